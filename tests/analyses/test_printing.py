"""Printed tables show the numbers of the files and fit a terminal."""

import json
import math
import re

import pandas
import pytest

from sinklens.analyses.printing import ALONE, ROWS, manifests, show
from sinklens.errors import SinklensError

LONG = (
    "KL divergence from the unchanged run (nats per undecided position, under replay), and more words than fit a line"
)


def planted(out, **tables):
    """A study's folder with the given tables."""
    for name, rows in tables.items():
        pandas.DataFrame(rows).to_csv(out / f"planted-{name}.csv", index=False)
    manifest = {"study": "planted", "models": [], "options": {}, "tables": list(tables)}
    (out / "planted.json").write_text(json.dumps(manifest))
    return manifest


def row(model="m", measure="kl", estimate=0.25, low=0.125, high=0.5, prompts=3, **more):
    return {"model": model, "measure": measure, **more, "estimate": estimate, "low": low, "high": high,
            "prompts": prompts}  # fmt: skip


def test_a_row_shows_labels_the_estimate_and_its_interval(tmp_path, capsys):
    rows = [row(layer=0, token="NA"), row(model="n", layer=1, token="null", estimate=3.0, low=1e-5, high=12345.678)]
    show(tmp_path, planted(tmp_path, one=rows))
    lines = [line for line in capsys.readouterr().out.splitlines() if "kl" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == [["kl", "0", "NA", "0.250 [0.125, 0.500]"], ["kl", "1", "null", "3 [1e-05, 1.23e+04]"]]


def test_numbers_beside_empty_cells_are_short_and_every_meaning_of_a_measure_is_printed(tmp_path, capsys):
    rows = [
        row(group="a", p=0.0012345678, meaning="of a"),
        row(group="b", p=math.nan, meaning="of b"),
        row(group="c", p=1.0, meaning=""),
    ]
    show(tmp_path, planted(tmp_path, one=rows))
    printed = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed if "│ kl" in line]
    assert [line[1:3] for line in cells] == [["a", "0.001"], ["b", ""], ["c", "1"]]
    assert [line for line in printed if line.startswith("kl:")] == ["kl: of a", "kl: of b"]


def test_tables_fit_80_columns_and_no_number_is_cut(tmp_path, capsys, monkeypatch):
    rows = [
        row(f"model-{model}", "a_measure_with_a_long_name", sign, -0.5, 0.5, way="strongest of the previous step",
            where="in every head and step", verdict="cannot tell", meaning=LONG)
        for model in "ab" for sign in (-0.123456, 0.123456)
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    show(tmp_path, planted(tmp_path, one=rows, two=rows))
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("-0.123 [-0.500, 0.500]") == 4
    assert "…" not in printed
    assert " ".join(printed.split()).count(f"a_measure_with_a_long_name: {LONG}") == 1


def test_a_long_table_is_cut_and_its_file_is_named(tmp_path, capsys):
    show(tmp_path, planted(tmp_path, one=[row(layer=layer) for layer in range(ROWS + 7)]))
    printed = capsys.readouterr().out
    assert printed.count("0.250 [") == ROWS
    assert f"… 7 more rows in {tmp_path / 'planted-one.csv'}" in printed


def test_empty_tables_missing_values_and_names_with_brackets_are_printed_and_earlier_tables_are_not(tmp_path, capsys):
    planted(tmp_path, differences=[row("n − m")])
    empty = pandas.DataFrame(columns=["model", "measure", "estimate", "low", "high", "prompts"])
    unknown = [
        row("a", estimate=math.nan, low=math.nan, high=math.nan),
        row("b", low=math.nan, high=math.nan, prompts=1),
    ]
    show(tmp_path, planted(tmp_path, one=[row("[bold]m[/]"), *unknown], none=empty))
    printed = capsys.readouterr().out
    assert "one: [bold]m[/] (3 prompts)" in printed
    assert [line.split("│")[2].strip() for line in printed.splitlines() if "│ kl" in line][1:] == ["–", "0.250"]
    assert ALONE in printed
    assert "n − m" not in printed


@pytest.mark.parametrize("text", ["[1]", "{", '{"study": "x"}', '{"a": 1}'])
def test_other_json_files_are_not_read_as_studies(tmp_path, text):
    planted(tmp_path, one=[row()])
    (tmp_path / "a.json").write_text(text)
    assert [manifest["study"] for manifest in manifests(tmp_path)] == ["planted"]


@pytest.mark.parametrize("name", ["../x", "/x", "other", 3])
def test_a_manifest_names_no_tables_of_another_study_or_folder(tmp_path, name):
    (tmp_path / "planted.json").write_text(json.dumps({"study": name, "models": [], "options": {}}))
    with pytest.raises(SinklensError, match=r"planted\.json is a manifest of .*; restore the file's name"):
        manifests(tmp_path)
