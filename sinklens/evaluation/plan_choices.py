"""What a plan of a run can be asked for by name: quantizations, and points that are watched.

Limitation: a checkpoint that is stored quantized is planned as the model that was quantized, with the form named here.
"""

from typing import NamedTuple

WATCHED = {"patterns": "attn.hook_pattern", "scores": "attn.hook_attn_scores", "streams": "hook_resid_post"}
"""Short names of points in every layer, for `plan_run`."""


class Quantized(NamedTuple):
    """How a linear layer's matrix is stored.

    Attributes:
        bits: of a weight.
        group: weights that share a float32 scale; 0 for one per output row.
    """

    bits: int
    group: int


QUANTIZATIONS = {"none": None, "bnb-int8": Quantized(8, 0), "bnb-nf4": Quantized(4, 64)}
"""Names as in `sinklens.load`. LLM.int8 (Dettmers et al., 2208.07339): a scale per row; NF4 (2305.14314): a scale per
64 weights, not quantized."""
