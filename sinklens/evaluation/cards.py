"""What plans know by name: quantizations, points that are watched, and GPUs as their makers publish them.

`Card.peak` is the rate of dense matrix products in bfloat16 (float16 on V100 and T4, which lack it), summed in float32.
The memory is as printed, in units of 10⁹ bytes; what programs can use differs by a few percent.

Sources: NVIDIA's data sheets of B200 (DGX B200), H200, H100 (SXM, PCIe, NVL), A100 (40 and 80 GB; PCIe and SXM), L40S,
L4, A10, V100 and T4; the architecture white papers of Ada (RTX 4090) and Ampere (RTX 3090); AMD's data sheet of the
Instinct MI300X.

Caveat: no run reaches these figures. A plan multiplies the peak by a share that you state; large products of a large
model reach about half.
"""

import math
from dataclasses import dataclass

from sinklens.errors import nearest, require


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: its name.
        peak: operations per second, in bfloat16 without sparsity, as its maker states it.
        memory: bytes.
        bandwidth: bytes per second from and to its memory; infinite if it is not known.
        reported: part of the name that PyTorch reports.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float = math.inf
    reported: str = "?"

    def rate(self, utilization: float, cards: int = 1) -> float:
        """Operations per second of a number of cards at a share of their peak.

        Raises:
            SettingError: the share is not above 0 and at most 1, or there is no card.
        """
        require(
            0 < utilization <= 1 and cards >= 1,
            f"utilization is above 0 and at most 1, with 1 card or more; got {utilization} and {cards}.",
        )
        return self.peak * utilization * cards


CARDS = {
    "b200": Card("B200", 2250e12, 180e9, 8.0e12, "B200"),
    "h200": Card("H200", 989e12, 141e9, 4.8e12, "H200"),
    "h100-pcie": Card("H100 PCIe", 756e12, 80e9, 2.0e12, "H100 PCIe"),
    "h100-nvl": Card("H100 NVL", 835e12, 94e9, 3.9e12, "H100 NVL"),
    "h100": Card("H100 SXM", 989e12, 80e9, 3.35e12, "H100"),
    "a100": Card("A100 (80 GB)", 312e12, 80e9, 2.039e12, "A100-SXM4-80GB"),
    "a100-pcie": Card("A100 PCIe (80 GB)", 312e12, 80e9, 1.935e12, "A100 80GB"),
    "a100-40": Card("A100 (40 GB)", 312e12, 40e9, 1.555e12, "A100"),
    "l40s": Card("L40S", 362e12, 48e9, 0.864e12, "L40S"),
    "l4": Card("L4", 121e12, 24e9, 0.3e12, "L4"),
    "a10": Card("A10", 125e12, 24e9, 0.6e12, "A10"),
    "rtx4090": Card("RTX 4090", 165e12, 24e9, 1.008e12, "RTX 4090"),
    "rtx3090": Card("RTX 3090", 71e12, 24e9, 0.936e12, "RTX 3090"),
    "t4": Card("T4", 65e12, 16e9, 0.32e12, "T4"),
    "v100": Card("V100", 125e12, 32e9, 0.9e12, "V100"),
    "mi300x": Card("MI300X", 1307e12, 192e9, 5.3e12, "MI300X"),
}
"""By the name of ``--card``, in the order in which `Card.reported` is looked for."""


def find_card(name: str) -> Card:
    """The card called `name`.

    Raises:
        SettingError: no card has this name.
    """
    require(name in CARDS, f"no card is called {name!r}; known: {', '.join(CARDS)}.{nearest(name, CARDS)}")
    return CARDS[name]


WATCHED = {"patterns": "attn.hook_pattern", "scores": "attn.hook_attn_scores", "streams": "hook_resid_post"}
"""Short names of points in every layer, for `plan_run`."""

QUANTIZATIONS = {"none": None, "bnb-int8": 1.0, "bnb-nf4": 0.5 + 4 / 64}
"""Name as in `sinklens.load` -> bytes per weight of the linear layers; None for those of the element type.

NF4 (Dettmers et al., 2305.14314) has a float32 scale per 64 weights. The scales per row of 8-bit weights are below 1 %
and not counted.
"""
