"""A run in the terminal: one line per step, with the answer filling in, and the strongest keys and sinks.

Where such a line is wider than the terminal, the keys of a step are listed below one another and its answer is wrapped.
Tokens are shown as text, never as markup: a generated ``[red]`` or an escape sequence is printed verbatim.
"""

from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklens.model import Model
from sinklens.runs.result import Generation
from sinklens.sinks.motion import jumps
from sinklens.views.figures import has_sink, most_moving_head
from sinklens.views.html import MASKED, token_texts

WIDE = 100_000  # columns, more than any line needs


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
        f"Each line shows the answer after a step: {MASKED} is {undecided}, · is the end of text, new tokens are bold. "
        f"Next come the {top} positions that are the strongest key (the one that receives most attention) in most of "
        f"the {heads} heads at that step, with their tokens and numbers of heads; positions 0 to "
        f"{run.prompt_length - 1} are the prompt. Last comes the strongest key of layer {layer} head {head}, whose "
        f"sink moves most (sinklens.views.most_moving_head(run.sinks)): ● if it is a sink, ○ if not (every head has a "
        f"strongest key; a sink receives more than 3 above the mean of the others).",
        style="dim",
    )
    words = token_texts(run.sinks)

    def place_text(step: int, place: int) -> str:
        return f"{place} ‘{words(int(run.canvas[row, step, place])).strip() or ' '}’"

    def lines(between: str) -> Table:
        grid = Table.grid()
        for style in ("dim", "", "cyan", "dark_orange"):
            grid.add_column(style=style, no_wrap=style == "dim", overflow="fold")
        for step in range(run.steps_run):
            counted = Counter(strongest[step].ravel().tolist()).most_common(top)
            places = between.join(f"{place_text(step, at)} ×{many}" for at, many in counted)
            at, mark = int(strongest[step][layer, head]), "●" if sunk[step, layer, head] else "○"
            named = place_text(step, at) if at >= 0 else "none"
            grid.add_row(
                f"{step:4d} ", _answer(model, run, row, step, words), Text(f"  │ {places}"), Text(f"  │ {mark} {named}")
            )
        return grid

    width = console.measure(lines("  "), options=console.options.update(width=WIDE)).maximum
    console.print(lines("  " if width <= console.width else "\n  │ "))
    moves = jumps(run.sinks, run.sinks.detect()).isel(batch=row).sum()
    often = int((sunk.mean(axis=0) >= 0.5).sum())
    console.print(
        f"{often} of the {heads} heads have a sink in at least half of the steps; between consecutive steps with a "
        f"sink, a head's sink moved in {int(moves['changes'])} of {int(moves['pairs'])} cases.",
        style="dim",
    )


def _answer(model: "Model", run: "Generation", row: int, step: int, words: Callable[[int], str]) -> Text:
    """The answer after `step`, up to its first end token."""
    shown = Text()
    for place in range(run.prompt_length, run.canvas.shape[2]):
        token = int(run.canvas[row, step + 1, place])
        if bool(run.undecided[row, step + 1, place]):
            shown.append(MASKED, style="blue")
        elif token in model.eos_token_ids:
            shown.append("·", style="dim")
        else:
            shown.append(words(token), style="bold green" if int(run.unmask_step[row, place]) == step else "")
    return shown
