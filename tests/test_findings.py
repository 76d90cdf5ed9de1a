"""The findings page: its tables are written from the stored results, and its text has no number that they lack."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("findings", ROOT / "scripts" / "findings.py")
script = importlib.util.module_from_spec(SPEC)
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    SPEC.loader.exec_module(script)
NUMBER = r"(?<![\w.,-])−?\d+(?:[.,]\d+)*(?![\w])"


def sections():
    """Title -> text of every section of the page, and of what precedes the first."""
    parts = re.split(r"^## (.*)\n", script.PAGE.read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def prose(text):
    """The text without code, links' targets, comments and the written tables."""
    text = script.MARKED.sub(" ", text)
    for pattern in (r"(?m)^    .*$", r"`[^`]*`", r"\]\([^)]*\)", r"(?s)<!--.*?-->"):
        text = re.sub(pattern, " ", text)
    return text


def constants(text):
    """Numbers that are definitions, which the section lists in a comment."""
    return set(" ".join(re.findall(r"<!-- constants: (.*?) -->", text)).split())


def unsupported(text):
    """Numbers in the text of a section that are neither in its tables nor listed as constants."""
    tables = " ".join(match[0] for match in script.MARKED.finditer(text))
    return set(re.findall(NUMBER, prose(text))) - set(re.findall(NUMBER, tables)) - constants(text)


@pytest.mark.extended
def test_the_tables_are_those_of_the_stored_results():
    assert script.PAGE.read_text() == script.current(script.PAGE.read_text()), "run python scripts/findings.py"
    assert {match[2] for match in script.MARKED.finditer(script.PAGE.read_text())} == set(script.TABLES)


@pytest.mark.parametrize("title", sections())
def test_every_number_in_the_text_is_in_a_table_of_its_section(title):
    assert unsupported(sections()[title]) == set()


def verdicts():
    """The rows of the page's first table: verdict, seeds and studies."""
    rows = [line.strip("| ").split(" | ") for line in sections()[""].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 8
    return [(cells[2], cells[4], re.findall(r"`(\w+)", cells[5])) for cells in rows]


@pytest.mark.parametrize(("verdict", "seeds", "studies"), verdicts())
def test_the_seeds_of_a_verdict_are_those_of_the_stored_results(verdict, seeds, studies):
    assert seeds.removesuffix(" of each") == script.tally(studies)
    assert "disagree" not in seeds or "cannot tell" in verdict


def test_seeds_agree_if_all_intervals_are_on_one_side_of_the_threshold():
    above, below, across = (2.0, 1.5, 2.5), (0.5, 0.2, 0.9), (1.2, 0.8, 1.6)
    assert script.agreement([above, above], 1.0) == script.agreement([below, below, below], 1.0) == "agree"
    assert script.agreement([above, below], 1.0) == script.agreement([below, below, across], 1.0) == "**disagree**"
    assert script.agreement([above, across], 1.0) == script.agreement([above, above, across], 1.0) == "cannot tell"
    assert script.agreement([above, above], 1.8) == "cannot tell"


def test_a_number_that_no_table_holds_is_found():
    table = "<!-- table: x -->\n| 8.9 [8.5, 9.2] |\n<!-- end of table -->\n"
    text = f"<!-- constants: 24 -->\nIn 24 steps, 8.9 % and 12.5 % move.\n{table}"
    assert unsupported(text) == {"12.5"}


@pytest.mark.parametrize("title", [title for title in sections() if title])
def test_every_section_names_the_command_that_measured_its_table(title):
    text = sections()[title]
    for match in script.MARKED.finditer(text):
        for file in script.files(script.TABLES[match[2]]):
            assert file == "ranges" or f"sinklens analyse {file.split('-')[0]} " in text, file
            assert (script.RESULTS / f"{file}.csv").is_file()
