"""Text of strangers is inert in every place where it is shown, and no writer goes around the escaping."""

import ast
import csv
import io
import re
from pathlib import Path

import pandas
import pytest
from hostile import HOSTILE
from markdown_it import MarkdownIt
from rich.console import Console
from rich.table import Table

from sinklens.errors import CheckpointError
from sinklens.utils.escaping import in_csv, in_markdown, on_console, read_csv, say, spelled

ROOT = Path(__file__).resolve().parents[2]
FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd", "@SUM(1)", " =1", "＝1", "'=1", "''=1", "\t=1"]


def texts(markdown, inside):
    """What the cell or the heading of a rendered page shows, and the kinds of its parts."""
    (inline,) = [
        token for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
        if token.type == "inline" and inside in token.content
    ]  # fmt: skip
    return "".join(part.content for part in inline.children), {part.type for part in inline.children}


def test_a_terminal_shows_one_line_for_each_text(capsys):
    say("before", f"a{HOSTILE}", "after")
    assert capsys.readouterr().out == f"before\na{spelled(HOSTILE)}\nafter\n"
    assert spelled(HOSTILE).isprintable()


def test_a_table_in_a_terminal_shows_markup_and_emoji_codes_as_they_are():
    written = io.StringIO()
    console, table = Console(file=written, width=300, force_terminal=True, color_system=None), Table(title="t")
    table.add_column(on_console(HOSTILE))
    table.add_row(on_console(HOSTILE))
    console.print(table)
    assert written.getvalue().count(spelled(HOSTILE)) == 2
    assert "\x1b" not in re.sub(r"\x1b\[\d*m", "", written.getvalue())


def test_no_cell_of_a_csv_is_a_formula_and_reading_gives_the_texts_again(tmp_path):
    given = pandas.DataFrame({"=name": [HOSTILE, *FORMULAS, "-1.5", "+1e-5", "it's"], "number": -0.5})
    (tmp_path / "a.csv").write_text(in_csv(given))
    with (tmp_path / "a.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["'=name", "number"]
    assert [cell for cell, _ in rows if re.match(r"\s*[=+\-@＝]", cell)] == ["-1.5", "+1e-5"]
    read = read_csv(tmp_path / "a.csv")
    assert list(read.iloc[:, 0]) == [spelled(text) for text in given["=name"]]
    assert list(read["number"]) == list(given["number"])


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2,3\n1,2,3,4\n", b"\xff\xfe", b'a\n"'])
def test_a_file_that_is_no_table_is_named(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.csv is not a table .*; run the study again"):
        read_csv(tmp_path / "a.csv")


@pytest.mark.parametrize("form", ["### {}", "| a |\n| --- |\n| {} |", "It is {}, one run."])
@pytest.mark.parametrize("text", [HOSTILE, *FORMULAS, "# a", "<http://a.b>", "&lt;", "~~a~~", "a\\", "[x]: y", "__a__"])
def test_markdown_shows_the_text_and_nothing_else(form, text):
    shown, parts = texts(form.format(f"x{in_markdown(text)}"), "x")
    assert f"x{spelled(text.replace(chr(10), ' '))}" in shown
    assert parts <= {"text", "text_special"}


def test_no_writer_goes_around_the_escaping():
    """Calls that write text as it is; markup for a console is a constant or text with numbers and known names."""
    allowed = {"sinklens/utils/escaping.py", "sinklens/cli/__init__.py"}
    found = []
    for file in [*ROOT.glob("sinklens/**/*.py"), *ROOT.glob("analyses/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or re.search(r"\.(to_csv|to_markdown|to_latex|to_html|read_csv|writerow)$", called):
                found += [f"{file.relative_to(ROOT)}: {called}"]
    ours = {"sinklens/cli/tracing.py: found.to_markdown"}
    assert {one for one in found if one.partition(":")[0] not in allowed} == ours
