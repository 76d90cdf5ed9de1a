"""The base of all studies, tested with a study that measures the length of prompts."""

import inspect
import json
import linecache
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import xarray as xr

import sinklens.analyses.study as study
from sinklens.analyses import STUDIES, Study, find, interval_table
from sinklens.analyses.study import _source_hash, read_prompts
from sinklens.cli import main
from sinklens.errors import LedgerError, SettingError, SinklensError
from sinklens.evaluation import LedgerRun
from sinklens.evaluation.ledger import Writer
from sinklens.tasks import held_out


@dataclass
class Letters(Study):
    """Counts letters; raises an interrupt at the prompt "stop"."""

    name: ClassVar[str] = "letters"
    asked: ClassVar[list[list[str]]] = []

    def measure(self, model, prompts, settings):
        self.asked.append(list(prompts))
        if "stop" in prompts:
            raise KeyboardInterrupt
        return xr.Dataset({"letters": ("prompt", [float(len(prompt)) for prompt in prompts])})

    def example(self, model, prompt, settings):
        return xr.Dataset({"text": prompt})

    def tables(self, measured):
        return {"letters": interval_table(measured, ["letters"], self.seed)}

    def figures(self, measured, examples):
        from sinklens.views import panels

        figure, (ax,) = panels(1)
        ax.plot(next(iter(measured.values()))["letters"])
        ax.set_title(str(next(iter(examples.values()))["text"].item()))
        return {"plot": figure}


@pytest.fixture(autouse=True)
def _fresh():
    Letters.asked.clear()


def test_batches_are_combined_in_the_order_of_the_prompts(tiny_llada):
    found = Letters(batch=2).run([tiny_llada], ["a", "bb", "ccc", "dddd", "eeeee"])
    assert Letters.asked == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
    assert found.measured["tiny-llada"]["letters"].values.tolist() == [1, 2, 3, 4, 5]
    assert found.tables["letters"]["estimate"].tolist() == [3.0]
    assert found.files == ()
    assert str(found.examples["tiny-llada"]["text"].item()) == "a"
    shown = Letters(batch=2, shown=4).run([tiny_llada], ["a", "bb", "ccc", "dddd", "eeeee"])
    assert str(shown.examples["tiny-llada"]["text"].item()) == "eeeee"


def test_one_model_and_one_prompt_need_no_list(tiny_llada):
    for models in ("tiny-llada", tiny_llada, tiny_llada.tree.hf):
        found = Letters().run(models, "one prompt")
        assert found.measured["tiny-llada"]["letters"].values.tolist() == [10]
    for ids in ([8, 9, 10], torch.tensor([8, 9, 10])):
        Letters.asked.clear()
        Letters().run("tiny-llada", ids)
        assert Letters.asked == [[[8, 9, 10]]]


def test_an_interrupted_study_resumes_prompt_by_prompt_in_any_batch_and_writes_the_same_files(
    tiny_llada, tmp_path, monkeypatch
):
    prompts, plain = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"], Letters.measure
    full = Letters(batch=7).run([tiny_llada], prompts, tmp_path / "full")

    def stopping(self, model, prompts, settings):
        if "ffffff" in prompts:
            raise KeyboardInterrupt
        return plain(self, model, prompts, settings)

    monkeypatch.setattr(Letters, "measure", stopping)
    for batch, measured in ((2, [["a", "bb"], ["ccc", "dddd"]]), (1, [["eeeee"]])):  # the unfinished batch of 2 is lost
        Letters.asked.clear()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            Letters(batch=batch).run([tiny_llada], prompts, tmp_path / "cut")
        assert Letters.asked == measured
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["units"]
    monkeypatch.setattr(Letters, "measure", plain)
    Letters.asked.clear()
    resumed = Letters(batch=3).run([tiny_llada], prompts, tmp_path / "cut")
    assert Letters.asked == [["ffffff", "ggggggg"]]
    xr.testing.assert_identical(resumed.measured["tiny-llada"], full.measured["tiny-llada"])
    assert [file.name for file in resumed.files] == [file.name for file in full.files]
    for one, other in zip(full.files, resumed.files, strict=True):
        if one.suffix not in (".nc", ".json"):  # HDF5 writes its own times, and a manifest the batch
            assert one.read_bytes() == other.read_bytes(), one.name


def test_equal_prompts_run_in_separate_batches(tiny_llada):
    with pytest.warns(UserWarning, match=r"2 of 4 prompts are copies of others. Intervals .* be too narrow"):
        found = Letters(batch=3).run([tiny_llada], ["a", "bb", "a", "a"])
    assert Letters.asked == [["a", "bb"], ["a"], ["a"]]
    assert found.measured["tiny-llada"]["letters"].values.tolist() == [1, 2, 1, 1]


def test_groups_are_a_coordinate_of_the_measurements_and_do_not_start_a_study_again(tiny_llada, tmp_path):
    found = Letters().run([tiny_llada], ["a", "bb", "ccc"], tmp_path, group=["x", "y", "x"])
    assert found.measured["tiny-llada"]["prompt_group"].values.tolist() == ["x", "y", "x"]
    assert found.manifest["groups"] == {"x": 2, "y": 1}
    asked = len(Letters.asked)
    again = Letters().run([tiny_llada], ["a", "bb", "ccc"], tmp_path, group=["x", "x", "x"])
    assert len(Letters.asked) == asked
    assert again.measured["tiny-llada"]["prompt_group"].values.tolist() == ["x"] * 3
    with pytest.raises(SettingError, match=r"group has one label for each of the 2 prompts; got \['x'\]"):
        Letters().run([tiny_llada], ["a", "bb"], group=["x"])


def test_shipped_problems_are_grouped_by_template_and_other_shared_text_is_reported(tiny_llada):
    problems = held_out(4)
    found = Letters().run([tiny_llada], [problem.prompt for problem in problems])
    assert found.measured["tiny-llada"]["prompt_group"].values.tolist() == [problem.kind for problem in problems]
    shared = [f"The shop of {name} sells nine red pens and blue pens each day." for name in ("Ann", "Ben")]
    with pytest.warns(UserWarning, match=r"67% of the prompts share 8 or more .* --group COLUMN"):
        found = Letters().run([tiny_llada], [*shared, "Is it?"])
    assert "prompt_group" not in found.measured["tiny-llada"].coords


def test_a_study_that_processes_prompts_one_by_one_gets_one_at_a_time(tiny_llada, monkeypatch):
    monkeypatch.setattr(Letters, "together", False)
    Letters(batch=3).run([tiny_llada], ["a", "bb"])
    assert Letters.asked == [["a"], ["bb"]]
    one_by_one = {name for name in STUDIES if not find(name).together}
    sources = {name: Path(inspect.getfile(find(name))).read_text() for name in STUDIES}
    assert one_by_one == {name for name, source in sources.items() if "each_prompt(" in source}


def test_progress_counts_prompts_and_starts_at_the_finished_ones(tiny_llada, tmp_path):
    seen = []
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters(batch=1).run([tiny_llada], ["a", "bb", "stop"], tmp_path, progress=lambda *call: seen.append(call))
    at_the_interrupt = ("tiny-llada", 2, 3)
    assert seen == [("tiny-llada", 0, 3), ("tiny-llada", 1, 3), ("tiny-llada", 2, 3), at_the_interrupt]
    seen.clear()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters(batch=2).run([tiny_llada], ["a", "bb", "stop"], tmp_path, progress=lambda *call: seen.append(call))
    assert seen == [("tiny-llada", 2, 3), at_the_interrupt]


def test_units_of_another_seed_prompt_or_code_are_not_used_and_a_warning_says_so(tiny_llada, tmp_path, monkeypatch):
    def interrupted(study, prompts=("a", "stop")):
        Letters.asked.clear()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            study.run([tiny_llada], list(prompts), tmp_path)
        assert Letters.asked == [["a"], ["stop"]]

    interrupted(Letters(batch=1))
    kept = r"holds .*1 finished prompts of tiny-llada with other {}[;.].* does not use them"
    with pytest.warns(UserWarning, match=kept.format("options.seed")):
        interrupted(Letters(batch=1, seed=1))
    with pytest.warns(UserWarning, match=kept.format("model.settings.steps")):
        interrupted(Letters(batch=1, settings={"steps": 8}))
    with pytest.warns(UserWarning, match=kept.format("prompts, prompts_sha256")):
        interrupted(Letters(batch=1), ["a", "stop", "b"])
    monkeypatch.setattr(study, "_code_hash", lambda: "another")
    with pytest.warns(UserWarning, match=kept.format("code")):
        interrupted(Letters(batch=1))
    assert len(LedgerRun.all(tmp_path / "units")) == 5


def test_adding_a_model_to_a_study_measures_only_that_model(tiny_llada, tiny_llama, tmp_path):
    Letters().run([tiny_llada], ["a", "bb"], tmp_path)
    Letters.asked.clear()
    with pytest.warns(UserWarning, match="holds another run of this study"):
        found = Letters().run([tiny_llada, tiny_llama], ["a", "bb"], tmp_path)
    assert Letters.asked == [["a", "bb"]]
    assert found.tables["letters"]["model"].tolist() == ["tiny-llada", "tiny-llama"]


def test_a_warning_precedes_the_replacement_of_results_of_other_prompts(tiny_llada, tmp_path):
    Letters().run(tiny_llada, ["a", "bb"], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Letters(batch=1).run(tiny_llada, ["a", "bb"], tmp_path)  # the same results again
    warning = r"holds another run of this study \(tiny-llada; prompts: 2\), which this run will replace; to keep it"
    with pytest.warns(UserWarning, match=warning), pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters().run(tiny_llada, ["stop"], tmp_path)
    assert json.loads((tmp_path / "letters.json").read_text())["prompts"] == 2
    for broken in ("{", "[]", '{"prompts": 2, "models": [], "options": 3}'):
        (tmp_path / "letters.json").write_text(broken)
        Letters().run(tiny_llada, ["a"], tmp_path)


def test_the_manifest_records_what_determines_the_numbers(tiny_llada, tiny_llama, tmp_path):
    study = Letters(seed=3, settings={"gen_length": 8, "steps": 4})
    found = study.run([tiny_llada, tiny_llama], ["a", "b"], tmp_path)
    manifest = json.loads((tmp_path / "letters.json").read_text())
    assert manifest == json.loads(json.dumps(found.manifest))
    assert (manifest["options"]["seed"], manifest["prompts"]) == (3, 2)
    first, second = manifest["models"]
    assert (first["name"], first["settings"]["steps"]) == ("tiny-llada", 4)
    assert second["settings"]["gen_length"] == 8
    assert "steps" not in second["settings"]  # an autoregressive model has no such setting
    assert first["weights"] != second["weights"]
    assert {"sinklens", "torch", "numpy"} <= manifest["versions"].keys()
    assert len(manifest["source"]) == 16
    stacked = xr.load_dataset(tmp_path / "letters.nc", engine="h5netcdf")
    assert stacked["letters"].dims == ("model", "prompt")
    assert stacked["model"].values.tolist() == ["tiny-llada", "tiny-llama"]


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda model: Letters(seed=-1), r"seed must be an integer from 0 to 2\*\*63 - 1; got -1"),
        (lambda model: Letters(batch=0), r"batch must be an integer of at least 1; got 0"),
        (
            lambda model: Letters(chat_template=True).run([model], ["a", [5, 6]]),
            r"prompt 1 is a list of token ids, to which a chat template cannot be applied; omit chat_template",
        ),
        (lambda model: Letters().run([], ["a"]), r"at least one model and one prompt"),
        (lambda model: Letters().run([model], []), r"at least one model and one prompt"),
        (
            lambda model: Letters().run([model, model], ["a"]),
            r"each model can be given only once; got tiny-llada, tiny-llada",
        ),
        (lambda model: Letters(shown=1).run([model], ["a"]), r"shown is the index of a prompt, 0 to 0; got 1"),
        (lambda model: Letters(settings={"stpes": 4}).run([model], ["a"]), r"'stpes'. Nearest: steps"),
        (lambda model: Letters(settings={"alg": "entropy"}).run([model], ["a"]), r"none of these models .* 'alg'"),
        (lambda model: Letters(settings={"steps": 99}).run([model], ["a"]), r"steps 99 is more than gen_length 24"),
        (lambda model: find("dynamic"), r"no study is called 'dynamic'.* Nearest: dynamics"),
    ],
)
def test_an_invalid_call_is_rejected(ask, text, tiny_llada):
    with pytest.raises(SettingError, match=text):
        ask(tiny_llada)
    assert Letters.asked == []


def test_a_run_that_cannot_be_measured_or_kept_is_an_error(tiny_llada, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"cannot write to .*Make room or choose another folder"):
        Letters().run([tiny_llada], ["a"], tmp_path / "file")
    Letters().run([tiny_llada], ["a"], tmp_path / "out")
    (run,) = LedgerRun.all(tmp_path / "out" / "units")
    with Writer(run), pytest.raises(LedgerError, match=r"another process is writing .* another folder \(--out\)"):
        Letters().run([tiny_llada], ["a"], tmp_path / "out")
    monkeypatch.setattr(Letters, "measure", lambda *given: xr.Dataset({"letters": ("prompt", [1.0])}))
    with pytest.raises(SettingError, match=r"measure got 2 prompts and returned \{'prompt': 1\}; its result needs"):
        Letters().run([tiny_llada], ["a", "bb"])


def test_token_ids_in_a_prompts_file_are_used_as_token_ids(tmp_path):
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    file.write_text('{"prompt": [2, 287, 28]}\n{"question": [2, 287, 28, 423]}\n')
    assert read_prompts(file) == [[2, 287, 28], [2, 287, 28, 423]]
    given = ["--gen-length", "2"]
    assert main(["analyse", "existence", "tiny-llama", "--prompts", str(file), "--out", str(out), *given]) == 0
    rows = [torch.tensor([2, 287, 28]), torch.tensor([2, 287, 28, 423])]
    same = find("existence")(settings={"gen_length": 2}).run("tiny-llama", rows)
    assert json.loads((out / "existence.json").read_text())["prompts_sha256"] == same.manifest["prompts_sha256"]


USER_STUDY = """
from dataclasses import dataclass
from typing import ClassVar

import xarray as xr

from sinklens.analyses import Study, interval_table


@dataclass
class Lengths(Study):
    name: ClassVar[str] = "lengths"

    def measure(self, model, prompts, settings):
        return xr.Dataset({"length": ("prompt", [float(len(prompt)) for prompt in prompts])})

    def tables(self, measured):
        return {"lengths": interval_table(measured, ["length"], self.seed)}

    def figures(self, measured, examples):
        return {}
"""


def test_a_study_in_a_user_file_runs_from_the_command_line(tmp_path, capsys):
    file, out = tmp_path / "json.py", tmp_path / "out"  # also the name of a standard module
    file.write_text(USER_STUDY)
    assert main(["analyse", str(file), "tiny-llama", "--limit", "3", "--out", str(out)]) == 0
    assert "lengths: 3 prompts, tiny-llama. Written:" in capsys.readouterr().out
    assert json.loads((out / "lengths.json").read_text())["source"]
    with pytest.raises(SettingError, match=r"no such file: .*nowhere\.py"):
        find(str(tmp_path / "nowhere.py"))
    file.write_text("x = 1\n")
    with pytest.raises(
        SettingError, match=r"must define exactly one subclass of sinklens.analyses.Study; it defines none"
    ):
        find(str(file))


def test_an_edited_study_in_a_notebook_gets_a_different_hash():
    def cell(number, text):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space = {"__name__": "a_notebook"}
        exec(compile(text, name, "exec"), space)
        return space["Lengths"]

    first, same, other = (
        cell(1, USER_STUDY),
        cell(2, USER_STUDY),
        cell(3, USER_STUDY.replace("len(prompt)", "len(prompt) + 1")),
    )
    assert _source_hash(first) == _source_hash(same) != _source_hash(other)
