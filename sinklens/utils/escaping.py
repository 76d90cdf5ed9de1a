"""Text of strangers, escaped for the place where it is shown: a terminal, a CSV file, a Markdown page.

Names of models, runs and tasks, prompts, answers and tokens come from other people's files. In every place some
characters are commands: escape sequences and direction marks in a terminal, ``=`` at the start of a spreadsheet's cell,
``|`` and backticks in Markdown. Each place has one function here, which all writers use; pages of HTML escape in
`sinklens.views.html`, labels of figures in `sinklens.sinks.labels`.

Pitfall: an escaped text is for reading. Files that programs read back, such as JSON and answer.txt, hold the original.
"""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklens.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]
    from rich.text import Text

FORMULA = re.compile(r"'*\s*[=+\-@＝＋－＠]")  # how a cell begins that a spreadsheet runs, or that is quoted already
NUMBER = re.compile(r"[-+]?\d[\d.e+\-]*")
MARKDOWN = re.compile(r"[\\`*_<>|~$&]|\](?=[\[(:])")


def spelled(text: str, keep: str = "") -> str:
    """`text` with control and direction characters as escapes, except those in `keep`."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )


def say(*lines: str, to: Any = None) -> None:
    """Print lines in a terminal, on standard output by default; a line break inside one is shown as an escape."""
    print("\n".join(spelled(line, keep="\t") for line in lines), file=to or sys.stdout, flush=True)


def on_console(text: str, keep: str = "") -> "Text":
    """`text` for rich's tables and consoles, without markup and emoji codes; `keep` as in `spelled`."""
    from rich.text import Text

    return Text(spelled(text, keep))


def in_csv(table: "DataFrame", form: str | None = None) -> str:
    """The table as CSV; `form` is that of floats. A text that begins like a formula gets an apostrophe in front."""

    def cell(value: object) -> object:
        text = spelled(value) if isinstance(value, str) else value
        return f"'{text}" if isinstance(text, str) and FORMULA.match(text) and not NUMBER.fullmatch(text) else text

    return str(table.map(cell).rename(columns=cell).to_csv(index=False, float_format=form))


def read_csv(file: "Path", needed: Sequence[str] = (), numbers: Sequence[str] = ()) -> "DataFrame":
    """A table that `in_csv` wrote, without the apostrophes; empty cells are NaN in the columns `numbers`, else "".

    Raises:
        CheckpointError: it is not a table with the columns `needed`, or one of `numbers` holds something else.
    """
    import pandas

    try:
        found = pandas.read_csv(file, keep_default_na=False, na_values={column: [""] for column in numbers})
    except (OSError, ValueError) as error:  # ValueError: pandas' own errors, and text that is not UTF-8
        raise CheckpointError(f"{file} is not a table ({str(error).strip()}); run the study again.") from error
    texts = [name for name in numbers if len(found) and name in found and found[name].dtype.kind not in "iuf"]
    if texts or not set(needed) <= set(found):
        wrong = f"{texts[0]} must hold numbers" if texts else f"it needs the columns {', '.join(needed)}"
        raise CheckpointError(f"{file} is not a table of a study ({wrong}); run the study again.")
    return found.map(
        lambda value: value[1:] if isinstance(value, str) and value[:1] == "'" and FORMULA.match(value) else value
    )


def in_markdown(text: str) -> str:
    r"""`text` for a line or a cell of Markdown, where it is neither code, emphasis, a link, markup nor a column.

    >>> in_markdown("a|b\n`c`")
    'a\\|b \\`c\\`'
    """
    return MARKDOWN.sub(r"\\\g<0>", spelled(text.replace("\n", " ")))
