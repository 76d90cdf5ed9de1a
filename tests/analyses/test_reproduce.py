"""The study of sinks in one folder: its verdicts, what it measures on planted runs, and what a kill leaves behind."""

import signal
import subprocess
import sys

import numpy as np
import pandas
import pytest
from ledgers import planted_run
from tracks import planted
from waiting import awaited

from sinklens.analyses.frontier import frontier
from sinklens.analyses.paper import CHECKPOINTS, ITEMS, apart
from sinklens.analyses.reproduce import SETTINGS, Request, _claims, _of_accuracy
from sinklens.analyses.runs import noise_of, own_run
from sinklens.cli import main
from sinklens.evaluation import LedgerRun, frame, masking
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.sinks import Record, SinkTrack
from sinklens.tasks import held_out

STEPS, LENGTH, PROMPT = 12, 40, 28


def unmasking(strongest):
    """A run that decides from the right, one position a step; `strongest` gives the only key with attention."""
    score = np.full((STEPS, LENGTH), 0.5)
    score[range(STEPS), [strongest(step) for step in range(STEPS)]] = 20
    step, place = np.ogrid[:STEPS, :LENGTH]
    states = {"masked": (place >= PROMPT) & (place < LENGTH - step), "committed": place == LENGTH - 1 - step}
    held = {name: (("batch", "step", "pos"), value[None]) for name, value in states.items()}
    return SinkTrack(planted(score).data.assign(held))


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
    of_masks, gaps, others = found.sel(place="rightmost mask"), [], []
    for step, place in enumerate(range(LENGTH - 1, PROMPT - 1, -1)):
        gaps.append(abs(strongest(step) - place))
        others.append(np.mean([abs(key - place) for key in range(LENGTH) if key != strongest(step)]))
    run = of_masks.sel(source="run")[["near", "begins", "distance"]]
    assert [float(value) for value in run.values()] == pytest.approx([near, begins, np.mean(gaps)])
    assert float(of_masks["distance"].sel(source="other keys")) == pytest.approx(np.mean(others))
    assert bool((of_masks["follows"] > 0.2).all()) == follows
    assert float(found["near"].sel(place="last decided", source="run")) == pytest.approx(
        1 if follows else near, abs=0.1
    )


def test_queries_are_split_as_their_patterns_say(tiny_llada):
    steps, layers = (6, 12, 18), range(4)
    record = Record(patterns=[(step, layer) for step in steps for layer in layers])
    found = own_run(tiny_llada, [problem.prompt for problem in held_out(2)], {}, record_sinks=record)
    measured, run = apart(found, seed=3), found.run
    for row, real in enumerate(run.real.numpy()):
        differ = np.zeros((2, 3))
        for at, step in enumerate(steps):
            masked = run.sinks["masked"][row, step].to_numpy()[real]
            halves = noise_of(run.canvas[row, 0], 3, step).permutation(masked)
            heads = [head.numpy()[real][:, real] for layer in layers for head in run.patterns[step, layer][row]]
            for split, members in enumerate((masked, halves)):
                keys = [[part[chosen].sum(0).argmax() for chosen in (members, ~members)] for part in heads]
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
    assert [one["verdict"].partition(":")[0] for one in _claims(item, table, [name])] == verdicts


@pytest.mark.parametrize(
    ("right", "total", "changes", "verdict"),
    [(99, 132, {}, "cannot tell"), (1000, 1319, {}, "agree"), (800, 1319, {}, "differ"),
     (1000, 1319, {"settings": {"gen_length": 128, "steps": 256, "block_length": 32}}, "cannot tell: gen_length 128")],
)  # fmt: skip
def test_an_accuracy_stands_beside_the_printed_one(right, total, changes, verdict, tmp_path):
    settings = changes or {"settings": {"gen_length": 256, "steps": 256, "block_length": 32}}
    answers = {str(number): number < right for number in range(total)}
    planted_run(tmp_path, answers, masking([1])[1], model=CHECKPOINTS["LLaDA"], protocol="llada-gsm8k", **settings)
    found = _of_accuracy(frame(tmp_path).iloc[0])
    assert (found["paper"], found["verdict"].startswith(verdict)) == ("0.75", True), found


@pytest.mark.parametrize(
    ("model", "own", "published", "lengths"),
    [
        ("tiny-llada", "tiny-", "llada-", {}),
        ("smollm2-135m-masked", "tiny-", "llada-", SETTINGS),
        ("somebody/else-8B", "llada-", "llada-", SETTINGS),
    ],
)
def test_a_shipped_model_answers_what_ships_with_it_unless_data_are_given(model, own, published, lengths, monkeypatch):
    monkeypatch.setattr(EvalProtocol, "make_task", lambda protocol, path: path)
    for data, start in ((None, own), ("folder", published)):
        asked = Request((model,), data=data)
        protocols, paths = zip(*asked.tasks(model), strict=True)
        assert [protocol.name.startswith(start) for protocol in protocols] == [True, True]
        assert (set(paths), asked.settings(model)) == ({data}, lengths)


def test_a_killed_reproduction_resumes_to_the_same_pages(tmp_path, monkeypatch):
    """A real process, killed while it evaluates, after a shard of it has run, gives those of one call with Ray."""
    monkeypatch.chdir(tmp_path)
    call = [
        "reproduce",
        "tiny-llada",
        "--limit",
        "3",
        "--batch-size",
        "1",
        "--only",
        "table1,table2",
        "frontier",
        "--out",
    ]

    def done():
        return sum(len(run.done()) for run in LedgerRun.all(tmp_path / "cut-out" / "table1"))

    assert (main([*call, "cut-out", "--shard", "2/3"]), done()) == (0, 20)
    process = subprocess.Popen([sys.executable, "-m", "sinklens.cli", *call, "cut-out"])
    awaited(lambda: done() >= 22 or process.poll() is not None, lambda: "no record", seconds=240)
    assert process.poll() is None
    process.kill()
    assert (process.wait(), (tmp_path / "cut-out" / "report.md").exists()) == (-signal.SIGKILL, False)
    assert main(["reproduce", "--resume", "--out", "cut-out"]) == 0
    on_ray = ["--engine", "ray", "--workers", "1"]
    assert main([*call, "full-out", *on_ray]) == 0
    for name in ("table1.csv", "table2.csv", "frontier.csv", "comparisons.csv", "report.md", "index.html"):
        resumed, complete = ((tmp_path / folder / name).read_text() for folder in ("cut-out", "full-out"))
        assert resumed.replace("cut-out", "full-out") == complete.replace(f" {' '.join(on_ray)}", ""), name
    assert "<td>begins, rightmost mask, run</td>" in complete
