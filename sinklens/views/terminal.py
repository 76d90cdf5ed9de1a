"""A run as lines of a terminal: one line per step, the answer filling in, and where the main sinks are.

Tokens are shown as text, never as markup: a generated ``[red]`` or an escape sequence appears as itself.
"""

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from sinklens.views.figures import most_moving_head

if TYPE_CHECKING:
    from sinklens.generation import Generation
    from sinklens.model import Model

BLANK = "░"


def show(model: "Model", run: "Generation", console: Console, row: int = 0, top: int = 3) -> None:
    """Print one row of a run.

    Args:
        top: positions named per step, by how many heads have their strongest key there.
    """
    assert run.sinks is not None, "record_sinks=True is needed"
    strongest = run.sinks.top(1).isel(batch=row, rank=0).to_numpy()
    heads = strongest[0].size
    layer, head = most_moving_head(run.sinks, row)
    console.print(
        f"Each line is the answer after a step: {BLANK} is not decided yet, · is the end of text, new tokens are bold. "
        f"On the right, the {top} positions where the most of the {heads} heads had their strongest key in that step, "
        f"with the token that stood there and how many heads; last, the position of layer {layer} head {head}, which "
        f"moves most.",
        style="dim",
    )
    answers = [_answer(model, run, row, step) for step in range(run.steps_run)]
    width = max(answer.cell_len for answer in answers)
    for step, answer in enumerate(answers):
        line = Text(f"{step:4d} ", style="dim")
        line.append_text(answer)
        line.append(" " * (width - answer.cell_len))
        counted = Counter(strongest[step].ravel().tolist()).most_common(top)
        sinks = "  ".join(f"{place} {_quoted(model, run, row, step, place)} ×{n}" for place, n in counted)
        line.append(f"  │ {sinks}", style="cyan")
        line.append(f"  │ {strongest[step][layer, head]}", style="dark_orange")
        console.print(line, soft_wrap=True)


def _answer(model: "Model", run: "Generation", row: int, step: int) -> Text:
    """The answer after `step`, up to its first end token."""
    shown = Text()
    for place in range(run.prompt_length, run.canvas.shape[2]):
        token = int(run.canvas[row, step + 1, place])
        if token in (model.mask_token_id, -1):
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
