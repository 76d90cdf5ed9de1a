"""The study of sinks in one folder: its verdicts, what it measures on planted runs, and what a kill leaves behind."""

import signal
import subprocess
import sys
import time

import numpy as np
import pandas
import pytest
from ledgers import planted_run
from tracks import planted

from sinklens.analyses.frontier import frontier
from sinklens.analyses.paper import CHECKPOINTS, ITEMS, apart
from sinklens.analyses.reproduce import _claims, _of_accuracy
from sinklens.analyses.runs import noise_of, own_run
from sinklens.cli import main
from sinklens.evaluation import LedgerRun, frame, masking
from sinklens.sinks import Record, SinkTrack
from sinklens.tasks import held_out

STEPS, LENGTH, PROMPT = 12, 40, 28


def unmasking(strongest):
    """A run that decides from the right, one position a step; `strongest` gives the only key with attention."""
    score, masked = np.full((STEPS, LENGTH), 0.5), np.zeros((STEPS, LENGTH), dtype=bool)
    for step in range(STEPS):
        masked[step, PROMPT : LENGTH - step] = True
        score[step, strongest(step)] = 20
    committed = masked & ~np.vstack([masked[1:], np.zeros((1, LENGTH), dtype=bool)])
    states = {"masked": masked, "committed": committed}
    track = planted(score)
    return SinkTrack(
        track.data.assign({name: track["masked"].copy(data=value[None]) for name, value in states.items()})
    )


@pytest.mark.parametrize(
    ("strongest", "near", "begins", "follows"),
    [
        (lambda step: LENGTH - 1 - step, 1.0, 1.0, True),  # the rightmost mask
        (lambda step: LENGTH - step if step else 5, 11 / 12, 0.0, True),  # the last decided position
        (lambda step: 5, 0.0, 0.0, False),  # a key of the prompt, which comes closer all the time
        (lambda step: PROMPT + 5, 3 / 12, 0.0, False),  # a key that the frontier passes
    ],
    ids=["rightmost mask", "last decided", "prompt", "passed"],
)
def test_sinks_at_the_frontier_are_found_and_others_are_not(strongest, near, begins, follows):
    found = frontier(unmasking(strongest)).isel(prompt=0)
    of_masks = found.sel(place="rightmost mask")
    run = of_masks.sel(source="run")
    assert (float(run["near"]), float(run["begins"])) == pytest.approx((near, begins))
    places = range(LENGTH - 1, PROMPT - 1, -1)
    gaps = [abs(strongest(step) - place) for step, place in enumerate(places)]
    others = [sum(abs(key - place) for key in range(LENGTH) if key != strongest(step)) / (LENGTH - 1)
              for step, place in enumerate(places)]  # fmt: skip
    assert float(run["distance"]) == pytest.approx(np.mean(gaps))
    assert float(of_masks["distance"].sel(source="other keys")) == pytest.approx(np.mean(others))
    assert bool((of_masks["follows"] > 0.2).all()) == follows
    decided = found["near"].sel(place="last decided", source="run")
    assert float(decided) == pytest.approx({True: 1.0, False: near}[follows], abs=0.1)


def test_queries_are_split_as_their_patterns_say(tiny_llada):
    prompts = [problem.prompt for problem in held_out(2)]
    steps, layers = (6, 12, 18), range(4)
    record = Record(patterns=[(step, layer) for step in steps for layer in layers])
    found = own_run(tiny_llada, prompts, {}, record_sinks=record)
    measured, run = apart(found, seed=3), found.run
    for row in range(2):
        real = run.real[row].numpy()
        differ = np.zeros((2, 3))
        for at, step in enumerate(steps):
            masked = run.sinks["masked"][row, step].to_numpy()[real]
            halves = noise_of(run.canvas[row, 0], 3, step).permutation(masked)
            for split, members in enumerate((masked, halves)):
                heads = [run.patterns[step, layer][row, head].numpy() for layer in layers for head in range(6)]
                keys = [
                    [part[real][:, real][chosen].sum(0).argmax() for chosen in (members, ~members)] for part in heads
                ]
                differ[split, at] = np.mean([first != second for first, second in keys])
        np.testing.assert_allclose(measured["apart"][row], differ.mean(axis=1))
        assert float(measured["separate"][row]) == pytest.approx(differ[0].mean() - differ[1].mean())


@pytest.mark.parametrize(
    ("item", "model", "row", "verdicts"),
    [
        ("fig10", "LLaDA", {"epsilon": 3, "estimate": 0.98, "low": 0.97, "high": 0.99}, ["agree"]),
        ("fig10", "Dream", {"epsilon": 3, "estimate": 0.97, "low": 0.95, "high": 0.99}, ["cannot tell"]),
        ("fig10", "MMaDA", {"epsilon": 3, "estimate": 0.9, "low": 0.89, "high": 0.91}, ["differ"]),
        ("fig10", "Llama", {"epsilon": 3, "estimate": 0.9, "low": 0.89, "high": 0.91}, ["cannot tell"]),  # no statement
        ("fig7", "Dream", {"measure": "drift", "estimate": -1, "low": -2, "high": -0.1}, ["agree"]),
        ("fig7", "LLaDA", {"measure": "drift", "estimate": -1, "low": -2, "high": -0.1}, ["differ"]),
        ("fig7", "LLaDA", {"measure": "drift", **dict.fromkeys(("estimate", "low", "high"), np.nan)}, ["cannot tell"]),
        ("table2", "LLaDA", {"token": "⏎", "estimate": 0.35, "low": 0.3, "high": 0.4}, ["agree", *["differ"] * 4]),
        ("table2", "LLaDA", {"token": "mask", "estimate": 0.3, "low": 0.29, "high": 0.31}, ["differ"] * 5),
        ("table2", "LLaDA", {"token": "⏎", "estimate": 0.3, "low": 0.25, "high": 0.35}, ["agree", *["differ"] * 4]),
        ("table2", "LLaDA", {"token": "⏎", "estimate": 0.35, "low": 0.3, "high": 0.4, "prompts": 29},
         ["cannot tell", *["differ"] * 4]),
        ("fig10", "", {"epsilon": 3, "estimate": 0.9, "low": 0.89, "high": 0.91}, ["not in the paper"]),
    ],
)  # fmt: skip
def test_a_verdict_follows_from_the_interval_and_is_given_for_the_models_of_the_paper(item, model, row, verdicts):
    name = CHECKPOINTS.get(model, "tiny-llada")
    table = pandas.DataFrame([{"model": name, "measure": next(iter(ITEMS[item].measures)), "prompts": 30} | row])
    found = list(_claims(item, table, [name]))
    assert [one["verdict"].partition(":")[0] for one in found] == verdicts


@pytest.mark.parametrize(
    ("right", "total", "changes", "verdict"),
    [(99, 132, {}, "cannot tell"), (1000, 1319, {}, "agree"), (800, 1319, {}, "differ"),
     (1000, 1319, {"settings": {"gen_length": 128, "steps": 256, "block_length": 32}}, "cannot tell: gen_length 128")],
)  # fmt: skip
def test_an_accuracy_stands_beside_the_printed_one(right, total, changes, verdict, tmp_path):
    settings = {"settings": {"gen_length": 256, "steps": 256, "block_length": 32}}
    answers = {str(number): number < right for number in range(total)}
    condition = masking([1])[1]
    more = {"model": CHECKPOINTS["LLaDA"], "protocol": "llada-gsm8k", **settings, **changes}
    planted_run(tmp_path, answers, condition, **more)
    found = _of_accuracy(frame(tmp_path).iloc[0])
    assert (found["paper"], found["verdict"].startswith(verdict)) == ("0.75", True), found


ASKED = ["--limit", "3", "--batch", "1", "--only", "table1", "table2", "frontier", "--out", "out"]
FILES = ("table1.csv", "table2.csv", "frontier.csv", "comparisons.csv", "report.md", "index.html")


def test_a_killed_reproduction_resumes_to_the_same_pages(tmp_path, monkeypatch, capsys):
    """A real process, killed while it evaluates, after a shard of it has run."""
    call = ["reproduce", "tiny-llada", *ASKED]
    for name in ("cut", "full"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cut")
    assert main([*call, "--shard", "2/3"]) == 0
    ledger = tmp_path / "cut" / "out" / "table1"
    before = sum(len(run.done()) for run in LedgerRun.all(ledger))
    assert (before, (tmp_path / "cut" / "out" / "report.md").exists()) == (20, False)
    process = subprocess.Popen([sys.executable, "-m", "sinklens.cli", *call], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while sum(len(run.done()) for run in LedgerRun.all(ledger)) < before + 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    assert not (tmp_path / "cut" / "out" / "report.md").exists()
    assert main(["reproduce", "--resume", "--out", "out"]) == 0
    monkeypatch.chdir(tmp_path / "full")
    assert main(call) == 0
    for name in FILES:
        resumed, whole = ((tmp_path / folder / "out" / name).read_bytes() for folder in ("cut", "full"))
        assert resumed == whole, name
    assert "| tiny-llada | begins, rightmost mask, run |" in (tmp_path / "cut" / "out" / "report.md").read_text()
    capsys.readouterr()
    assert main([*call, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "3 generations",
        "Table 1, tiny-gsm",
        "3 samples x 10 runs",
        "Table 1, tiny-code",
        "GPU memory by batch",
    ):
        assert text in printed
