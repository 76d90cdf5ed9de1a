"""Claims: one line per accuracy and comparison, in four formats that say the same, with what they rest on."""

import csv
import io
import json
import math
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from ledgers import planted_run

from sinklens.errors import SettingError
from sinklens.evaluation import claims, format_claims, masking, read_lines
from sinklens.evaluation.claim_lines import FORMATS
from sinklens.evaluation.ledger import export

UNMASKED, ONE, RANDOM = masking([1], ["random"])
VERSIONS = {"sinklens": "0.4", "torch": "2.9", "transformers": "5.0"}


def verdicts(text):
    return {f"s{number:02d}": letter == "1" for number, letter in enumerate(text)}


@pytest.fixture
def ledger(tmp_path):
    made = {"versions": VERSIONS, "device_name": "Card 1"}
    planted_run(tmp_path, verdicts("1111111100"), UNMASKED, **made)
    planted_run(tmp_path, verdicts("1100000010"), ONE, **made)
    planted_run(tmp_path, verdicts("1111110000"), RANDOM, control_requested=20, control_picked=18, **made)
    return tmp_path


def by_name(found):
    return {(claim.condition, claim.against): claim for claim in found.itertuples()}


def test_there_is_a_line_for_every_accuracy_and_comparison(ledger):
    found = by_name(claims(read_lines(ledger)))
    assert set(found) == {
        ("unmasked", ""), ("1 sink", ""), ("1 sink", "unmasked"), ("1 sink", "1 random key"), ("1 random key", ""),
        ("1 random key", "unmasked"),
    }  # fmt: skip
    lines = {line.condition: line for line in read_lines(ledger)}
    pair, one = lines["1 sink"].against_unmasked, found["1 sink", "unmasked"]
    assert (one.value, one.low, one.high, one.p) == (
        pair.difference.value,
        pair.difference.low,
        pair.difference.high,
        pair.difference.p,
    )
    assert (one.n, one.lost, one.gained, one.seed) == (10, 6, 1, 0)
    assert (found["unmasked", ""].value, found["unmasked", ""].n) == (0.8, 10)
    assert (one.regime, one.device, one.refused) == ("diffusion", "cpu; Card 1", "")
    assert one.versions == "sinklens 0.4; torch 2.9; transformers 5.0"
    assert found["1 random key", ""].keys == "18 of 20"
    assert one.keys == ""


def test_all_formats_say_the_same(ledger):
    found = claims(read_lines(ledger))
    read = json.loads(format_claims(found, "json"))
    rows = list(csv.DictReader(io.StringIO(format_claims(found, "csv"))))
    assert len(read) == len(rows) == len(found)
    for claim, plain, row in zip(found.to_dict(orient="records"), read, rows, strict=True):
        assert set(plain) == set(row) == set(claim)
        for name, value in plain.items():
            missing = pd.isna(claim[name])
            assert (value is None, row[name] == "") == (missing, missing or claim[name] == "")
            assert missing or value == pytest.approx(claim[name]) == type(value)(row[name])
    markdown = format_claims(found, "markdown").splitlines()
    latex = format_claims(found, "latex").splitlines()
    assert len(markdown) == len(found) + 2
    assert latex[:2] == [r"\begin{tabular}{lllllllllllll}", r"\toprule"]
    assert len([line for line in latex if line.endswith(r"\\")]) == len(found) + 1
    one = next(line for line in markdown if "1 sink | unmasked" in line)
    assert "| 10 | -0.500 |" in one
    assert "1 sink & unmasked & 10 & -0.500" in next(line for line in latex if "1 sink & unmasked" in line)


def test_latex_and_markdown_escape_what_would_break_them(tmp_path):
    planted_run(tmp_path, {"a": True}, UNMASKED, model="/m/50%_a|b&c")
    found = claims(read_lines(tmp_path))
    assert r"/m/50\%\_a|b\&c & unmasked" in format_claims(found, "latex")
    assert r"| /m/50%_a\|b&c | unmasked |" in format_claims(found, "markdown")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"versions": VERSIONS | {"torch": "2.8"}}, "versions differ: torch 2.8, torch 2.9"),
        ({"seed": 1}, "the unmasked run differs: seed 0, here 1"),
        ({"revision": "abc"}, "the unmasked run differs: revision unset, here abc"),
        ({"dtype": "bfloat16"}, "the unmasked run differs: dtype float32, here bfloat16"),
        (
            {"settings": {"gen_length": 24, "steps": 24, "block_length": 8}},
            "the unmasked run differs: regime diffusion, here blocks of 8",
        ),
    ],
)
def test_what_differs_in_more_than_the_intervention_is_named(tmp_path, changes, named):
    planted_run(tmp_path, verdicts("1111"), UNMASKED, versions=VERSIONS)
    planted_run(tmp_path, verdicts("1100"), ONE, **{"versions": VERSIONS} | changes)
    one = by_name(claims(read_lines(tmp_path)))["1 sink", "unmasked"]
    assert (one.refused.startswith(named), math.isnan(one.value), math.isnan(one.p)) == (True, True, True), one.refused


def test_a_baseline_is_beside_its_published_score_before_any_intervention(tmp_path):
    from sinklens.evaluation.protocols import find_protocol
    from sinklens.families.samplers import make_settings

    protocol = find_protocol("llada-instruct-gsm8k-blocks")
    settings = vars(make_settings("llada", protocol.of("llada"), {}))
    verdict = {f"g{number}": number < 1000 for number in range(1319)}
    for condition in (ONE, UNMASKED):
        planted_run(tmp_path, verdict, condition, protocol=protocol.name, settings=settings,
                    model="GSAI-ML/LLaDA-8B-Instruct")  # fmt: skip
    found = claims(read_lines(tmp_path))
    assert found.against.tolist()[:3] == ["", "published: ML-GSAI/LLaDA, EVAL.md", ""]
    assert found.value[1] == pytest.approx(1000 / 1319 - 1037 / 1319)
    assert found.regime[1] == "blocks of 8"


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(SettingError, match=r"one of markdown, latex, csv, json; got 'markdwon'. Nearest: markdown"):
        format_claims(claims([]), "markdwon")
    assert FORMATS == ("markdown", "latex", "csv", "json")


def test_a_database_of_format_2_stays_readable(tmp_path):
    shutil.copytree(Path(__file__).with_name("old_database"), tmp_path, dirs_exist_ok=True)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
    found = by_name(claims(read_lines(tmp_path)))
    assert {name: (one.value, one.n, one.seed, one.regime) for name, one in found.items() if not name[1]} == {
        ("unmasked", ""): (0.5, 2, 0, "diffusion"),
        ("1 sink", ""): (0.5, 2, 0, "diffusion"),
        ("1 random key", ""): (0.5, 2, 0, "diffusion"),
        ("mine", ""): (0.5, 2, 0, "diffusion"),
    }
    one = found["1 sink", "1 random key"]
    assert (one.value, one.lost, one.gained, one.n) == (0.0, 0, 0, 2)
    assert found["1 random key", ""].keys == "552 of 552"
    assert one.versions == "sinklens 0.2.0; torch 2.13.0+cpu; transformers 5.23.0"
    assert one.device == "cpu; x86_64"
    assert export(tmp_path, tmp_path / "records.jsonl") == 8
