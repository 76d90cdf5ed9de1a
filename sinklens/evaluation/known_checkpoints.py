"""What is published about checkpoints, for `verify`: parameter counts, fingerprints and scores.

Caveat: a count in billions has the digits that its source states, so it distinguishes sizes, not checkpoints. Only the
shipped models have fingerprints; for others the reports on docs/verified.md are to be compared.
"""

from dataclasses import dataclass

from sinklens.evaluation.protocols import PROTOCOLS
from sinklens.evaluation.published import DREAM_BASE, DREAM_INSTRUCT, LLADA_15, LLADA_BASE, LLADA_INSTRUCT, Published


@dataclass(frozen=True)
class Known:
    """A checkpoint of which something is published.

    Attributes:
        name: as on the hub, or shipped.
        parameters: number of parameters, up to `rounding`.
        rounding: half a unit of the last digit that the source states.
        source: where the number is stated.
        fingerprint: `Model.fingerprint`; "" if it is not known.
        right: of the 500 held-out word problems, how many a shipped model gets right; None for others,
            and for models of text.
    """

    name: str
    parameters: int
    rounding: int
    source: str
    fingerprint: str = ""
    right: int | None = None

    def of(self, model: str) -> bool:
        """Whether `model`, a name or a folder, is this checkpoint."""
        return model.rstrip("/").split("/")[-1] == self.name.split("/")[-1]


_TABLE_5 = "Nie et al., 2502.09992, Table 5"
_QWEN = "model card of Qwen2.5-7B, whose architecture and initial weights it has"


def _shipped(name: str, fingerprint: str, parameters: int, right: int | None) -> Known:
    return Known(name, parameters, 0, f"model card of {name}", fingerprint, right)


KNOWN = (
    _shipped("tiny-canvas", "e096eff9718515ea", 1834416, 490),
    _shipped("tiny-dream", "e26870b0cad372aa", 2020416, 498),
    _shipped("tiny-duo", "f6c9e8d271c6c991", 2196996, 413),
    _shipped("tiny-llada", "49c30b6a6a6fe0ca", 2018112, 458),
    _shipped("tiny-llada-moe", "e4559764a2e67e6b", 3793984, 489),
    _shipped("tiny-llada-skills", "0dcac91da5c74471", 2018112, 435),
    _shipped("tiny-llama", "a1b2bc2759bf1277", 2018112, 500),
    _shipped("tiny-llama-skills", "af74d733e9ec23b4", 2018112, 500),
    _shipped("tiny-mdlm", "b93459020d82773c", 2196996, 426),
    _shipped("tiny-mmada", "f0d0d6973732d565", 2028480, 470),
    _shipped("tiny-sdar", "de13e59ab3a71608", 2018368, 500),
    _shipped("tiny-text", "8f8d7d21f82bb2a8", 3344064, None),
    _shipped("tiny-text-causal", "454bda7e2aaac03a", 3344064, None),
    _shipped("tiny-two-modes", "9df3b332d5d12f92", 2018112, 500),
    *(Known(name, 8_020_000_000, 5_000_000, _TABLE_5) for name in (LLADA_BASE, LLADA_INSTRUCT, LLADA_15)),
    *(Known(name, 7_610_000_000, 10_000_000, _QWEN) for name in (DREAM_BASE, DREAM_INSTRUCT)),
    Known("meta-llama/Llama-3.1-8B-Instruct", 8_030_000_000, 5_000_000, _TABLE_5),
)
HELD_OUT = 500


def known(model: str) -> Known | None:
    """What is published about `model`; None if nothing is."""
    return next((one for one in KNOWN if one.of(model)), None)


def protocol_for(model: str) -> str:
    """The protocol with which to measure `model`.

    A shipped model is measured on its own word problems; others on GSM8K, with a protocol that has their score, and
    with the study's settings if there is none.
    """
    found = known(model)
    if found is not None and found.right is not None:
        return "tiny-gsm"
    scored = [name for name, protocol in PROTOCOLS.items() if protocol.task.startswith("gsm8k")]
    best = max(scored, key=lambda name: len(scores_of(model, name)))  # the first of those with most scores
    return best if scores_of(model, best) else "llada-gsm8k"


def scores_of(model: str, protocol: str) -> tuple[Published, ...]:
    """The published scores of `model` under a protocol, with 0, 1, 5 and 10 sinks masked; none under an unknown one."""
    found = known(model)
    if protocol == "tiny-gsm" and found is not None and found.right is not None:
        return (Published(found.name, found.right / HELD_OUT, found.source, HELD_OUT),)
    listed = PROTOCOLS[protocol].published if protocol in PROTOCOLS else ()
    return tuple(score for score in listed if score.of(model) and score.score is not None)
