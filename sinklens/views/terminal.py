"""A run in the terminal: one line per step, with the answer filling in, and the strongest keys and sinks.

Tokens are shown as text, never as markup: a generated ``[red]`` or an escape sequence is printed verbatim.
"""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.text import Text

from sinklens.sinks.motion import jumps
from sinklens.views.figures import has_sink, most_moving_head

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

BLANK = "░"


def show(model: "Model", run: "Generation", console: Console, row: int = 0, top: int = 3) -> None:
    """Print one row of a run.

    Args:
        run: a run with sink scores.
        top: number of positions listed per step, those that are the strongest key of most heads.
    """
    assert run.sinks is not None, "record_sinks=True is needed"
    strongest = run.sinks.top(1).isel(batch=row, rank=0).to_numpy()
    heads = strongest[0].size
    layer, head = most_moving_head(run.sinks, row)
    sunk = has_sink(run.sinks, row)
    undecided = "a position that does not exist yet" if run.sinks.causal else "not decided yet"
    console.print(
        f"Each line shows the answer after a step: {BLANK} is {undecided}, · is the end of text, new tokens are bold. "
        f"Next come the {top} positions that are the strongest key (the one that receives most attention) in most of "
        f"the {heads} heads at that step, with their tokens and numbers of heads; positions 0 to "
        f"{run.prompt_length - 1} are the prompt. Last comes the strongest key of layer {layer} head {head}, whose "
        f"sink moves most (sinklens.views.most_moving_head(run.sinks)): ● if it is a sink, ○ if not (every head has a "
        f"strongest key; a sink receives more than 3 above the mean of the others).",
        style="dim",
    )
    answers = [_answer(model, run, row, step) for step in range(run.steps_run)]
    places = [_places(model, run, row, step, strongest[step], top) for step in range(run.steps_run)]
    wide, width = max(answer.cell_len for answer in answers), max(place.cell_len for place in places)
    for step, (answer, place) in enumerate(zip(answers, places, strict=True)):
        line = Text(f"{step:4d} ", style="dim")
        line.append_text(answer)
        line.append(" " * (wide - answer.cell_len))
        line.append("  │ ", style="cyan").append_text(place)
        line.append(" " * (width - place.cell_len))
        at = int(strongest[step][layer, head])
        place_text = f"{at} {_quoted(model, run, row, step, at)}" if at >= 0 else "none"
        line.append(f"  │ {'●' if sunk[step, layer, head] else '○'} {place_text}", style="dark_orange")
        console.print(line, soft_wrap=True)
    moves = jumps(run.sinks, run.sinks.detect()).isel(batch=row).sum()
    often = int((sunk.mean(axis=0) >= 0.5).sum())
    console.print(
        f"{often} of the {heads} heads have a sink in at least half of the steps; between consecutive steps with a "
        f"sink, a head's sink moved in {int(moves['changes'])} of {int(moves['pairs'])} cases.",
        style="dim",
    )


def _places(
    model: "Model", run: "Generation", row: int, step: int, strongest: Int[np.ndarray, "layer head"], top: int
) -> Text:
    """The positions that are the strongest key of most heads, with tokens and numbers of heads."""
    counted = Counter(strongest.ravel().tolist()).most_common(top)
    entries = (f"{at} {_quoted(model, run, row, step, at)} ×{heads}" for at, heads in counted)
    return Text("  ".join(entries), style="cyan")


def _answer(model: "Model", run: "Generation", row: int, step: int) -> Text:
    """The answer after `step`, up to its first end token."""
    shown = Text()
    for place in range(run.prompt_length, run.canvas.shape[2]):
        token = int(run.canvas[row, step + 1, place])
        if bool(run.undecided[row, step + 1, place]):
            shown.append(BLANK, style="blue")
        elif token in model.eos_token_ids:
            shown.append("·", style="dim")
        else:
            new = int(run.unmask_step[row, place]) == step
            shown.append(token_text(model, token), style="bold green" if new else "")
    return shown


def _quoted(model: "Model", run: "Generation", row: int, step: int, place: int) -> str:
    return f"‘{token_text(model, int(run.canvas[row, step, place])).strip() or ' '}’"


def token_text(model: "Model", token: int) -> str:
    """One token as printable text: ⏎ for a newline, control characters spelled out."""
    if token < 0:
        return BLANK
    if token == model.mask_token_id:
        return BLANK
    if model.tokenizer is None:
        return f"⟨{token}⟩"
    text = str(model.tokenizer.decode([token])).replace("\n", "⏎")
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
