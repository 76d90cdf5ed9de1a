"""Holes in a text: prefix, suffix and any number of gaps, for runs and for likelihoods.

`holes` turns a text with gaps into the arguments of a run: the text before the first gap is the prompt, the text after
the last one a `Suffix`, and what lies between two gaps is on the canvas from the first step on (`ForceTokens`). The
probability of a span between two texts is a `likelihood` under a `Suffix`.

Limitation: every part is tokenized alone. A gap has a fixed number of tokens, and a text that was tokenized as a whole
may have its borders elsewhere; pass token ids to decide them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sinklens.errors import PromptError
from sinklens.interventions.canvas import ForceTokens, Suffix

if TYPE_CHECKING:
    from sinklens.model import Model

Part = str | int | Sequence[int]


def holes(model: "Model", parts: Sequence[Part]) -> dict[str, Any]:
    """The arguments of a run that fills the holes of a text.

        sinklens.generate(model, **holes(model, ["Tom has", 2, " apples and", 3, " pens."]))

    Args:
        parts: in order, texts or token ids that are given, and the numbers of undecided positions of holes; the first
            is given.

    Returns:
        ``prompt``, ``gen_length`` (from the first hole to the last) and ``hooks``. Add settings and further hooks as
        you like; positions of the answer that are given count as decided from the first step on.

    Raises:
        PromptError: no hole, an empty one, or a hole or nothing at the beginning; given ids that contain the mask.
        SettingError: in the run, a model that does not see text after its answer.
    """
    given = [not isinstance(part, int) for part in parts]
    if not parts or not given[0] or all(given):
        raise PromptError(
            f"a text with holes begins with text or token ids and has at least one hole, the number of its positions; "
            f"got {list(parts)!r:.80}."
        )
    if any(isinstance(part, int) and part < 1 for part in parts):
        raise PromptError(f"a hole has at least one position; got {list(parts)!r:.80}.")
    first, last = given.index(False), len(parts) - 1 - given[::-1].index(False)
    prompt = [token for number, part in enumerate(parts[:first]) for token in _ids(model, part, number == 0)]
    forced: dict[int, int] = {}
    place = len(prompt)
    for part in parts[first : last + 1]:
        if isinstance(part, int):
            place += part
            continue
        tokens = _ids(model, part)
        forced |= dict(enumerate(tokens, start=place))
        place += len(tokens)
    after = [token for part in parts[last + 1 :] for token in _ids(model, part)]
    if model.mask_token_id in (*prompt, *forced.values(), *after):
        raise PromptError(
            f"the given parts contain the mask token ({model.mask_token_id}); write a hole as its length."
        )
    hooks = [ForceTokens(tokens=forced)] if forced else []
    hooks += [Suffix(text=after)] if after else []  # type: ignore[list-item]
    ids = torch.tensor([prompt])
    given_ids = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # ids alone may look like padding
    return {"prompt": given_ids, "gen_length": place - len(prompt), "hooks": hooks}


def _ids(model: "Model", part: Part, start: bool = False) -> list[int]:
    """Token ids of a given part; only a text at the start gets a start token."""
    if isinstance(part, str):
        return [int(token) for token in model.encode(part, **({} if start else {"prepend_bos": False})).ids[0]]
    assert not isinstance(part, int)
    return [int(token) for token in part]
