"""What all studies share, shown with a study that measures the length of prompts."""

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
from building import shared_model

import sinklens.analyses.study as study
from sinklens.analyses import STUDIES, find
from sinklens.analyses.intervals import interval_table
from sinklens.analyses.study import Study, _source_hash, read_prompts
from sinklens.cli import main
from sinklens.errors import LedgerError, SettingError, SinklensError
from sinklens.evaluation.ledger import LedgerRun, Writer


@dataclass
class Letters(Study):
    """Counts letters; stops before a prompt that says so."""

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
        from sinklens.views.figures import panels

        figure, (ax,) = panels(1)
        ax.plot(next(iter(measured.values()))["letters"])
        ax.set_title(str(next(iter(examples.values()))["text"].item()))
        return {"plot": figure}


@pytest.fixture(autouse=True)
def _fresh():
    Letters.asked.clear()


def test_batches_make_one_dataset_in_the_order_of_the_prompts(tiny_llada):
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


def test_an_interrupted_study_goes_on_and_gives_the_same_files(tiny_llada, tmp_path, monkeypatch):
    prompts = ["a", "bb", "ccc", "dddd"]
    whole = Letters(batch=1).run([tiny_llada], prompts, tmp_path / "whole")
    plain = Letters.measure

    def once(self, model, prompts, settings):
        if prompts == ["ccc"]:
            raise KeyboardInterrupt
        return plain(self, model, prompts, settings)

    monkeypatch.setattr(Letters, "measure", once)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters(batch=1).run([tiny_llada], prompts, tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["units"]
    (kept,) = LedgerRun.all(tmp_path / "cut" / "units")
    assert kept.done() == {"0", "1"}
    monkeypatch.setattr(Letters, "measure", plain)
    Letters.asked.clear()
    again = Letters(batch=1).run([tiny_llada], prompts, tmp_path / "cut")
    assert Letters.asked == [["ccc"], ["dddd"]]
    assert [file.name for file in again.files] == [file.name for file in whole.files]
    for one, other in zip(whole.files, again.files, strict=True):
        if one.suffix == ".nc":  # HDF5 writes its own times
            xr.testing.assert_identical(
                xr.load_dataset(one, engine="h5netcdf"), xr.load_dataset(other, engine="h5netcdf")
            )
        else:
            assert one.read_bytes() == other.read_bytes(), one.name
    Letters.asked.clear()
    Letters(batch=4).run([tiny_llada], prompts, tmp_path / "cut")
    assert Letters.asked == []


def test_another_batch_resumes_prompt_by_prompt(tiny_llada, tmp_path, monkeypatch):
    """Equal tables, and no finished prompt is measured twice, whatever the batch of either start."""
    prompts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"]
    plain = Letters.measure

    def stopping(self, model, prompts, settings):
        if "ffffff" in prompts:
            raise KeyboardInterrupt
        return plain(self, model, prompts, settings)

    monkeypatch.setattr(Letters, "measure", stopping)
    for batch, measured in ((2, [["a", "bb"], ["ccc", "dddd"]]), (1, [["eeeee"]])):  # of 2, the one in flight is lost
        Letters.asked.clear()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            Letters(batch=batch).run([tiny_llada], prompts, tmp_path / "cut")
        assert Letters.asked == measured
    monkeypatch.setattr(Letters, "measure", plain)
    Letters.asked.clear()
    resumed = Letters(batch=3).run([tiny_llada], prompts, tmp_path / "cut")
    assert Letters.asked == [["ffffff", "ggggggg"]]
    undisturbed = Letters(batch=7).run([tiny_llada], prompts, tmp_path / "whole")
    xr.testing.assert_identical(resumed.measured["tiny-llada"], undisturbed.measured["tiny-llada"])
    names = [folder / "letters-letters.csv" for folder in (tmp_path / "cut", tmp_path / "whole")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_equal_prompts_run_apart(tiny_llada):
    with pytest.warns(UserWarning, match=r"2 of 4 prompts are copies of others. Intervals .* are too narrow"):
        found = Letters(batch=3).run([tiny_llada], ["a", "bb", "a", "a"])
    assert Letters.asked == [["a", "bb"], ["a"], ["a"]]
    assert found.measured["tiny-llada"]["letters"].values.tolist() == [1, 2, 1, 1]


def test_a_study_that_takes_prompts_one_by_one_is_given_one(tiny_llada, monkeypatch):
    monkeypatch.setattr(Letters, "together", False)
    Letters(batch=3).run([tiny_llada], ["a", "bb"])
    assert Letters.asked == [["a"], ["bb"]]
    one_by_one = {name for name in STUDIES if not find(name).together}
    sources = {name: Path(inspect.getfile(find(name))).read_text() for name in STUDIES}
    assert one_by_one == {name for name, source in sources.items() if "each_prompt(" in source}


def test_progress_counts_prompts_and_starts_with_those_that_are_kept(tiny_llada, tmp_path):
    seen = []
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters(batch=1).run([tiny_llada], ["a", "bb", "stop"], tmp_path, progress=lambda *told: seen.append(told))
    assert seen == [("tiny-llada", 0, 3), ("tiny-llada", 1, 3), ("tiny-llada", 2, 3)]
    seen.clear()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters(batch=2).run([tiny_llada], ["a", "bb", "stop"], tmp_path, progress=lambda *told: seen.append(told))
    assert seen == [("tiny-llada", 2, 3)]


def test_units_of_another_seed_prompt_or_code_are_not_taken_and_that_is_said(tiny_llada, tmp_path, monkeypatch):
    def interrupted(study, prompts=("a", "stop")):
        Letters.asked.clear()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            study.run([tiny_llada], list(prompts), tmp_path)
        assert Letters.asked == [["a"], ["stop"]]

    interrupted(Letters(batch=1))
    kept = r"keeps .*1 finished prompts of tiny-llada with other {}[;.].* not mixed"
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


def test_another_model_of_the_same_study_measures_that_one_alone(tiny_llada, tiny_llama, tmp_path):
    Letters().run([tiny_llada], ["a", "bb"], tmp_path)
    Letters.asked.clear()
    with pytest.warns(UserWarning, match="holds another run of this study"):
        found = Letters().run([tiny_llada, tiny_llama], ["a", "bb"], tmp_path)
    assert Letters.asked == [["a", "bb"]]
    assert found.tables["letters"]["model"].tolist() == ["tiny-llada", "tiny-llama"]


def test_two_processes_do_not_measure_the_same(tiny_llada, tmp_path):
    Letters().run([tiny_llada], ["a"], tmp_path)
    (run,) = LedgerRun.all(tmp_path / "units")
    with Writer(run), pytest.raises(LedgerError, match=r"another process is writing .* another folder \(--out\)"):
        Letters().run([tiny_llada], ["a"], tmp_path)


def test_a_measure_that_gives_another_number_of_prompts_is_refused(tiny_llada, monkeypatch):
    monkeypatch.setattr(Letters, "measure", lambda *given: xr.Dataset({"letters": ("prompt", [1.0])}))
    with pytest.raises(SettingError, match=r"measure was given 2 prompts and gave \{'prompt': 1\}; its result needs"):
        Letters().run([tiny_llada], ["a", "bb"])


def test_a_folder_with_results_of_other_prompts_is_told_of_before_they_are_replaced(tiny_llada, tmp_path):
    Letters().run(tiny_llada, ["a", "bb"], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Letters(batch=1).run(tiny_llada, ["a", "bb"], tmp_path)  # the same results again
    told = r"holds another run of this study \(tiny-llada; prompts: 2\), which this one will replace; to keep it"
    with pytest.warns(UserWarning, match=told), pytest.raises(KeyboardInterrupt, match=r"^$"):
        Letters().run(tiny_llada, ["stop"], tmp_path)
    assert json.loads((tmp_path / "letters.json").read_text())["prompts"] == 2
    for broken in ("{", "[]", '{"prompts": 2, "models": [], "options": 3}'):
        (tmp_path / "letters.json").write_text(broken)
        Letters().run(tiny_llada, ["a"], tmp_path)


def test_the_manifest_tells_what_decided_the_numbers(tiny_llada, tiny_llama, tmp_path):
    study = Letters(seed=3, settings={"gen_length": 8, "steps": 4})
    found = study.run([tiny_llada, tiny_llama], ["a", "b"], tmp_path)
    manifest = json.loads((tmp_path / "letters.json").read_text())
    assert manifest == json.loads(json.dumps(found.manifest))
    assert manifest["options"]["seed"] == 3
    assert manifest["prompts"] == 2
    first, second = manifest["models"]
    assert (first["name"], first["settings"]["steps"]) == ("tiny-llada", 4)
    assert "steps" not in second["settings"]  # an autoregressive model has no such setting
    assert second["settings"]["gen_length"] == 8
    assert first["weights"] != second["weights"]
    assert {"sinklens", "torch", "numpy"} <= manifest["versions"].keys()
    assert len(manifest["source"]) == 16
    stacked = xr.load_dataset(tmp_path / "letters.nc", engine="h5netcdf")
    assert stacked["letters"].dims == ("model", "prompt")
    assert stacked["model"].values.tolist() == ["tiny-llada", "tiny-llama"]


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda model: Letters(seed=-1), r"seed is 0 or more; got -1"),
        (lambda model: Letters(batch=0), r"batch is the number of prompts per run, at least 1; got 0"),
        (
            lambda model: Letters(chat_template=True).run([model], ["a", [5, 6]]),
            r"prompt 1 is token ids, which a chat template cannot be put around; leave it off",
        ),
        (lambda model: Letters().run([], ["a"]), r"at least one model and one prompt"),
        (lambda model: Letters().run([model], []), r"at least one model and one prompt"),
        (lambda model: Letters().run([model, model], ["a"]), r"each model is asked once; got tiny-llada, tiny-llada"),
        (lambda model: Letters(shown=1).run([model], ["a"]), r"shown is the number of a prompt, 0 to 0; got 1"),
        (lambda model: Letters(settings={"stpes": 4}).run([model], ["a"]), r"'stpes'. Nearest: steps"),
        (lambda model: Letters(settings={"alg": "entropy"}).run([model], ["a"]), r"none of these models .* 'alg'"),
        (lambda model: Letters(settings={"steps": 99}).run([model], ["a"]), r"steps 99 is more than gen_length 24"),
        (lambda model: find("dynamic"), r"no study is called 'dynamic'.* Nearest: dynamics"),
    ],
)
def test_a_wrong_call_is_refused(ask, text, tiny_llada):
    with pytest.raises(SettingError, match=text):
        ask(tiny_llada)
    assert Letters.asked == []


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tiny_llada, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"could not write .*Make room or choose another place"):
        Letters().run([tiny_llada], ["a"], tmp_path / "file")


def test_every_study_is_found_by_its_name():
    assert {name: find(name).name for name in STUDIES} == {name: name for name in STUDIES}


def test_token_ids_of_a_prompts_file_are_asked_as_token_ids(tmp_path):
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    file.write_text('{"prompt": [2, 287, 28]}\n{"question": [2, 287, 28, 423]}\n')
    assert read_prompts(file) == [[2, 287, 28], [2, 287, 28, 423]]
    given = ["--gen-length", "2"]
    assert main(["analyse", "layers", "tiny-llama", "--prompts", str(file), "--out", str(out), *given]) == 0
    rows = [torch.tensor([2, 287, 28]), torch.tensor([2, 287, 28, 423])]
    same = find("layers")(settings={"gen_length": 2}).run("tiny-llama", rows)
    assert json.loads((out / "layers.json").read_text())["prompts_sha256"] == same.manifest["prompts_sha256"]


OWN = """
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


def test_a_study_in_a_file_of_ones_own_is_a_command(tmp_path, capsys):
    file, out = tmp_path / "json.py", tmp_path / "out"  # a name that a module of Python's bears too
    file.write_text(OWN)
    assert main(["analyse", str(file), "tiny-llama", "--number", "3", "--out", str(out)]) == 0
    assert "lengths: 3 prompts, tiny-llama. Written:" in capsys.readouterr().out
    assert json.loads((out / "lengths.json").read_text())["source"]
    with pytest.raises(SettingError, match=r"there is no file .*nowhere\.py"):
        find(str(tmp_path / "nowhere.py"))
    file.write_text("x = 1\n")
    with pytest.raises(SettingError, match=r"has to define one subclass of sinklens.analyses.Study; it defines none"):
        find(str(file))


def test_an_edited_study_of_a_notebook_has_another_hash():
    def cell(number, text):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space = {"__name__": "a_notebook"}
        exec(compile(text, name, "exec"), space)
        return space["Lengths"]

    first, same, other = cell(1, OWN), cell(2, OWN), cell(3, OWN.replace("len(prompt)", "len(prompt) + 1"))
    assert _source_hash(first) == _source_hash(same) != _source_hash(other)


@pytest.mark.parametrize("given", [torch.arange(8, 20).view(2, 6), [[8, 9, 10, 11], [12, 13]]])
def test_prompts_may_be_token_ids(given, tmp_path):
    study = find("existence")(settings={"gen_length": 4}, batch=1)
    found = study.run([shared_model()], given, tmp_path, progress=False)
    (measured,) = found.measured.values()
    assert measured.sizes["prompt"] == 2
