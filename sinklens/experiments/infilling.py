"""Holes in a text: prefix, suffix and any number of gaps, for runs and for likelihoods.

`holes` turns a text with gaps into the arguments of a run: the text before the first gap is the prompt, the text after
the last one a `Suffix`, and what lies between two gaps is on the canvas from the first step on (`ForceTokens`). The
probability of a span between two texts is a `likelihood` under a `Suffix`.

Limitation: every part is tokenized alone. A gap has a fixed number of tokens, and a text that was tokenized as a whole
may have its borders elsewhere; pass token ids to decide them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch

from sinklens.errors import PromptError, require
from sinklens.interventions.canvas import ForceTokens, Suffix
from sinklens.model import Model
from sinklens.model.prompts import Encoded
from sinklens.runs.intervention import Intervention
from sinklens.utils.arguments import Unread, checked

Part = str | int | Sequence[int]


@checked
def holes(model: "Model", parts: Annotated[Sequence[Part] | Sequence[Sequence[Part]], Unread]) -> dict[str, Any]:
    """The arguments of a run that fills the holes of a text, or of several texts.

        sinklens.generate(model, **holes(model, ["Tom has", 2, " apples and", 3, " pens."]))
        sinklens.generate(model, **holes(model, [["Tom has", 2, " pens."], [1, " has", 1, " pens."]]))

    Args:
        parts: in order, texts or token ids that are given, and the numbers of undecided positions of holes; or a list
            of such lists. A text that begins with a hole has the tokenizer's start token as its prompt, or no prompt.

    Returns:
        ``prompts``, ``gen_length`` (from the first hole to the last) and ``hooks``. Add settings and further hooks as
        you like; positions of the answer that are given count as decided from the first step on.

    Raises:
        PromptError: not a list; no hole, an empty one, or nothing given; given ids that contain the mask; texts of a
            batch with unequal numbers of tokens from the first hole to the last, or after it.
        SettingError: in the run, a model that does not see text after its answer.
    """
    require(
        isinstance(parts, Sequence) and not isinstance(parts, str),
        f"parts is a list of texts, token ids and numbers of undecided positions, such as ['Tom has', 2, ' apples']; "
        f"got {parts!r:.60}.",
        PromptError,
    )
    given: Any = parts
    lists = all(isinstance(part, Sequence) and not isinstance(part, str) for part in given)
    several = bool(given) and lists and any(not isinstance(entry, int) for part in given for entry in part)
    rows = [_row(model, row) for row in (given if several else [given])]
    sizes = {(len(row.answer), len(row.after)) for row in rows}
    require(
        len(sizes) <= 1,
        f"texts of one batch need equally many tokens from the first hole to the last, and after it; these have "
        f"{', '.join(f'{answer} and {after}' for answer, after in sorted(sizes))}. Run them one by one: "
        f"[generate(model, **holes(model, parts)) for parts in texts].",
        PromptError,
    )
    (size, behind), columns = sizes.pop(), zip(*(row.answer for row in rows), strict=True)
    forced = {at - size - behind: column for at, column in enumerate(columns) if set(column) != {None}}
    hooks: list[Intervention] = [ForceTokens(tokens=forced)] if forced else []
    hooks += [Suffix(text=[row.after for row in rows])] if behind else []
    longest = max(len(row.prompt) for row in rows)
    require(
        all(row.prompt for row in rows) or not longest,
        f"{model.name} has no start token, so a text that begins with a hole has no prompt, and cannot be in one "
        f"batch with texts that have one; run it alone.",
        PromptError,
    )
    lead = [longest - len(row.prompt) for row in rows]
    ids = [[model.reader.pad] * pads + row.prompt for pads, row in zip(lead, rows, strict=True)]
    real = torch.arange(longest) >= torch.tensor(lead)[:, None]  # ids alone may look like padding
    prompt = Encoded(torch.tensor(ids, dtype=torch.long).reshape(len(rows), longest), real)
    return {"prompts": prompt, "gen_length": size, "hooks": hooks}


class _Row(NamedTuple):
    """A text with holes as ids: before the first hole, from there to the last (None in holes), and after it."""

    prompt: list[int]
    answer: list[int | None]
    after: list[int]


def _row(model: "Model", parts: Sequence[Part]) -> _Row:
    """One text with holes."""
    given = [not isinstance(part, int) for part in parts]
    require(
        any(given) and not all(given),
        f"a text with holes has text or token ids and at least one hole, the number of its positions; got "
        f"{list(parts)!r:.80}.",
        PromptError,
    )
    require(
        not any(isinstance(part, bool) or (isinstance(part, int) and part < 1) for part in parts),
        f"a hole has at least one position; got {list(parts)!r:.80}.",
        PromptError,
    )
    first, last = given.index(False), len(parts) - 1 - given[::-1].index(False)
    prompt = [token for number, part in enumerate(parts[:first]) for token in _ids(model, part, number == 0)]
    if not first:
        start = getattr(model.tokenizer, "bos_token_id", None)
        prompt = [] if start is None else [int(start)]
    answer: list[int | None] = []
    for part in parts[first : last + 1]:
        answer += [None] * part if isinstance(part, int) else _ids(model, part)
    after = [token for part in parts[last + 1 :] for token in _ids(model, part)]
    require(
        model.mask_token_id not in (*prompt, *answer, *after),
        f"the given parts contain the mask token ({model.mask_token_id}); write a hole as its length.",
        PromptError,
    )
    return _Row(prompt, answer, after)


def _ids(model: "Model", part: Any, start: bool = False) -> list[int]:
    """Token ids of a given part; only a text at the start gets a start token."""
    if isinstance(part, str):
        return [int(token) for token in model.encode(part, **({} if start else {"prepend_bos": False})).ids[0]]
    return [int(token) for token in part]
