"""The page of findings: its tables are those of the stored results, and so is every number in its text."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from contracts import ROOT
from scipy.stats import t

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("findings")
    from findings_tables import LOG
TEXT = script.PAGE.read_text()
NUMBER = r"(?<![\w.,-])−?\d+(?:[.,]\d+)*(?![\w])"


def prose(text):
    """The text without code, links' targets, comments and the written tables."""
    text = script.MARKED.sub(" ", text)
    for pattern in (r"(?m)^    .*$", r"`[^`]*`", r"\]\([^)]*\)", r"(?s)<!--.*?-->"):
        text = re.sub(pattern, " ", text)
    return text


@pytest.mark.extended
def test_the_tables_are_those_of_the_stored_results():
    assert script.current(TEXT) == TEXT, "run python scripts/findings.py"
    assert {match[2] for match in script.MARKED.finditer(TEXT)} == set(script.TABLES)


def test_every_number_of_the_page_is_in_one_of_its_tables():
    tables = " ".join(match[0] for match in script.MARKED.finditer(TEXT))
    constants = re.findall(r"<!-- constants: (.*?) -->", TEXT)[0].split()  # definitions
    assert set(re.findall(NUMBER, prose(TEXT))) - set(re.findall(NUMBER, tables)) <= set(constants)


def test_the_page_is_short_and_has_four_figures():
    text, _ = TEXT.split("## The numbers")
    assert len(prose(text).split()) <= 1500
    assert len(re.findall(r"!\[", text)) == 4
    assert sum(any(map(str.isalnum, word)) for word in TEXT.split()) <= 4000


def test_seeds_are_combined_by_the_rule_of_the_code():
    """A t interval over the seeds on the measure's scale, with the errors that the same prompts give to all."""
    ratios = [(2.0, 1.6, 2.5), (3.0, 2.5, 3.6), (2.5, 2.0, 3.125)]
    found = script.combined(ratios, LOG)
    logs = np.log([one[0] for one in ratios])
    errors = [np.log(high / low) / (2 * 1.959964) for _, low, high in ratios]
    half = t.ppf(0.975, 2) * np.sqrt(logs.var(ddof=1) / 3 + np.mean(np.square(errors)))
    np.testing.assert_allclose([found.low, found.high], np.exp([logs.mean() - half, logs.mean() + half]))
    assert script.judged(found, 1.0, p=0.04) == "above"
    assert script.judged(found, 1.0, p=0.06) == script.judged(found, 2.5, p=0.0) == "cannot tell"
    assert script.judged(found, 9.0, p=0.0) == "below"


def test_figures_of_the_pair_on_the_pages_of_papers_are_stored():
    for row in script.stored("papers-pair").dropna(subset="digits").itertuples():
        found = [script.number(value, int(row.digits)) for value in (row.estimate, row.low, row.high)]
        page = (script.PAGE.parent / "papers" / row.page).read_text()
        assert "{} [{}, {}]".format(*found) in " ".join(page.split()), row


def test_the_page_names_the_command_that_measured_each_table():
    for table in script.TABLES.values():
        for file in script.files(table):
            assert f"sinklens analyse {Path(file).name.split('-')[0]} " in TEXT, file
            assert (script.RESULTS / f"{file}.csv").is_file()
