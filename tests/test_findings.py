"""The findings page: its tables are written from the stored results, and its text has no number that they lack."""

import importlib.util
import re
from pathlib import Path

import pandas
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
    assert script.agreement([above, below], 1.0) == script.agreement([above, below, across], 1.0) == "**disagree**"
    assert script.agreement([above, across], 1.0) == script.agreement([below, below, across], 1.0) == "cannot tell"
    assert script.agreement([above, above], 1.8) == "cannot tell"


def test_a_matched_ratio_that_compares_few_of_the_sinks_is_left_out(monkeypatch):
    shares = {"model": ["one", "two"], "estimate": [0.0, 1.5], "low": [0.0, 1.2], "high": [0.0, 1.9]}
    table = pandas.DataFrame({**shares, "matched_share": [0.0, 0.6], "prompts": 9})
    monkeypatch.setattr(script, "stored", lambda file: table)
    row = script.TABLES["kinds"].rows[0].__class__("ratio", {})
    assert script.found(row, "any", "one") is None
    assert script.found(row, "any", "two") == (1.5, 1.2, 1.9, 9)


def test_the_mean_of_the_seeds_is_that_of_the_differences_within_each_seed(monkeypatch, tmp_path):
    """Where a measure and a difference have the same labels, the difference is meant."""
    (tmp_path / "seeds").mkdir()
    rows = {"model": "m", "measure": "cost", "estimate": [0.5, 0.1], "low": [0.4, 0.05], "high": [0.6, 0.2]}
    table = pandas.DataFrame({**rows, "compared": ["measurement", "difference"]})
    table.to_csv(tmp_path / "seeds" / "study-seeds.csv", index=False)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    row = script.TABLES["kinds"].rows[0].__class__("cost", {"measure": "cost"}, 100.0, 0, "study-claims")
    assert script.over_seeds(row, "m") == "10 [5, 20]"
    assert script.over_seeds(row, "other") == ""


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
