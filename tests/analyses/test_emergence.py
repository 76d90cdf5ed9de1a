"""Emergence: checkpoints become points of a curve, and each measure equals that of a loop."""

import shutil

import numpy as np
import pytest
import xarray as xr

import sinklens
from sinklens.analyses import find
from sinklens.analyses.emergence import MEASURES, run_and_step, runs_and_steps, sinks_of
from sinklens.errors import SettingError
from sinklens.model.files import find_checkpoint
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The shipped diffusion model twice and the autoregressive one once, named as checkpoints of these steps."""
    folder = tmp_path_factory.mktemp("over-training")
    for name, step in (("tiny-llada", 800), ("tiny-llada", 90), ("tiny-llama", 800)):
        shutil.copytree(find_checkpoint(name, None), folder / f"{name}@{step}")
    return sorted(folder.iterdir())


def test_checkpoints_become_one_curve_per_run(checkpoints, tmp_path):
    findings = find("emergence")(batch=2).run(checkpoints, PROMPTS, tmp_path)
    table = findings.tables["emergence"]
    assert set(table["measure"]) == set(MEASURES)
    part = table[table["measure"] == "heads"]
    assert list(zip(part["model"], part["step"], strict=True)) == [
        ("tiny-llada", 90), ("tiny-llada", 800), ("tiny-llama", 800),
    ]  # fmt: skip
    assert part["estimate"].iloc[0] == part["estimate"].iloc[1] != part["estimate"].iloc[2]
    assert (tmp_path / "emergence-emergence.png").stat().st_size > 10_000


def test_measures_equal_those_of_a_loop(tiny_llama):
    run = sinklens.generate(tiny_llama, PROMPTS, progress=False)
    found, scores = sinks_of(run.sinks), run.sinks.scores().to_numpy()
    real = run.real.numpy()
    for row in range(len(PROMPTS)):
        start = int(np.argmax(real[row]))
        have, best, first, changes, pairs = [], [], [], 0, 0
        for layer in range(4):
            for head in range(6):
                before = None
                for step in range(run.steps_run):
                    values = scores[row, step, layer, head]
                    if (run.canvas[row, step, run.prompt_length :] == tiny_llama.eos_token_ids[0]).any():
                        break  # the row has ended and waits for the other
                    known = values[~np.isnan(values)]
                    have.append((known > (known.sum() - known) / (len(known) - 1) + 3).any())
                    best.append(known.max())
                    place = int(np.nanargmax(values))
                    first.append(place == start)
                    if before is not None:
                        changes, pairs = changes + (place != before), pairs + 1
                    before = place
        assert found["heads"][row] == pytest.approx(np.mean(have))
        assert found["main_score"][row] == pytest.approx(np.mean(best), rel=1e-6)
        assert found["start"][row] == pytest.approx(np.mean(first))
        assert found["jump_share"][row] == pytest.approx(changes / pairs)


def test_runs_of_one_name_are_distinguished_by_their_folders():
    names = [f"em/r1/{end}" for end in ("tiny@100", "tiny@200")] + ["em/r2/tiny@100", "em/r2/other@100/"]
    found = runs_and_steps(names)
    assert list(found) == names
    assert list(found.values()) == [("r1/tiny", 100), ("r1/tiny", 200), ("r2/tiny", 100), ("r2/other", 100)]
    assert runs_and_steps(["a/one@3", "b/two@3"]) == {"a/one@3": ("one", 3), "b/two@3": ("two", 3)}
    assert runs_and_steps(["a/b/x@1", "c/b/x@1"])["c/b/x@1"] == ("c/b/x", 1)


def test_two_runs_of_one_name_stay_two_curves():
    first, second = (xr.Dataset({name: ("prompt", [number, number]) for name in MEASURES}) for number in (1, 2))
    data = {"em/r1/tiny@100": first, "em/r2/tiny@100": second}
    table = find("emergence")().tables(data)["emergence"]
    part = table[table["measure"] == "heads"]
    assert part[["model", "estimate"]].to_numpy().tolist() == [["r1/tiny", 1.0], ["r2/tiny", 2.0]]


def test_the_same_step_of_the_same_run_can_be_given_only_once(checkpoints, tiny_llada):
    with pytest.raises(SettingError, match=r"a/x@1 and \./a/x@01 are the same step of the same run; give each"):
        runs_and_steps(["a/x@1", "b/x@1", "./a/x@01"])
    study = find("emergence")()
    with pytest.raises(SettingError, match=r"are the same step of the same run"):
        study.run([checkpoints[0], checkpoints[0].parent / ".." / checkpoints[0].parent.name / checkpoints[0].name])
    with pytest.raises(SettingError, match=r"folders called RUN@STEP, e.g. tiny-llada@400; got tiny-llada"):
        study.run([checkpoints[0], tiny_llada])


@pytest.mark.parametrize("name", ["tiny-llada", "run@", "run@latest", "@"])
def test_a_name_without_a_step_is_rejected(name):
    with pytest.raises(SettingError, match=r"folders called RUN@STEP, e.g. tiny-llada@400; got"):
        run_and_step(name)
