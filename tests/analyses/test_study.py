"""The base of all studies, tested with a study that measures the length of prompts."""

import json
import linecache
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import xarray as xr

import sinklens.analyses.study as study
from sinklens.analyses import Study, find, interval_table
from sinklens.analyses.study import _source_hash
from sinklens.cli import main
from sinklens.errors import LedgerError, SettingError, SinklensError
from sinklens.evaluation import LedgerRun
from sinklens.evaluation.ledger import Writer
from sinklens.tasks import held_out

TOKENS = ["1 word ␣a", "2 newline ⏎"]


@dataclass
class Letters(Study):
    """Counts letters; raises an interrupt at the prompt "stop"."""

    name: ClassVar[str] = "letters"
    asked: ClassVar[list[list[str]]] = []

    def measure(self, model, prompts, settings):
        self.asked.append(list(prompts))
        if "stop" in prompts:
            raise KeyboardInterrupt
        letters = [float(len(prompt)) for prompt in prompts]
        thirds = [[letter / 3, float("nan")] for letter in letters]
        return xr.Dataset({"letters": ("prompt", letters), "thirds": (("prompt", "token"), thirds)}, {"token": TOKENS})

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


def test_batches_are_combined_in_the_order_of_the_prompts_and_equal_prompts_are_apart(tiny_llada):
    with pytest.warns(UserWarning, match=r"1 of 5 prompts are copies of others. Intervals .* be too narrow"):
        found = Letters(batch_size=2, shown=2).run("tiny-llada", ["a", "bb", "ccc", "ccc", "eeeee"])
    assert Letters.asked == [["a", "bb"], ["ccc", "eeeee"], ["ccc"]]
    assert found.measured["tiny-llada"]["letters"].values.tolist() == [1, 2, 3, 3, 5]
    assert (found.tables["letters"]["estimate"].tolist(), found.files) == ([2.8], ())
    assert str(found.examples["tiny-llada"]["text"].item()) == "ccc"
    Letters.asked.clear()
    Letters().run(tiny_llada, torch.tensor([8, 9, 10]))
    assert Letters.asked == [[[8, 9, 10]]]


def test_an_interrupted_study_resumes_prompt_by_prompt_in_any_batch_and_writes_the_same_files(
    tiny_llada, tmp_path, monkeypatch
):
    prompts, plain = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"], Letters.measure
    full = Letters(batch_size=7).run([tiny_llada], prompts, tmp_path / "full")

    def stopping(self, model, prompts, settings):
        if "ffffff" in prompts:
            raise KeyboardInterrupt
        return plain(self, model, prompts, settings)

    seen = []
    monkeypatch.setattr(Letters, "measure", stopping)
    for batch, measured in ((2, [["a", "bb"], ["ccc", "dddd"]]), (1, [["eeeee"]])):  # the unfinished batch of 2 is lost
        Letters.asked.clear()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            Letters(batch_size=batch).run(
                [tiny_llada], prompts, tmp_path / "cut", progress=lambda *call: seen.append(call)
            )
        assert Letters.asked == measured
    assert [done for _, done, _ in seen] == [0, 2, 4, 4, 4, 5, 5]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["units"]
    monkeypatch.setattr(Letters, "measure", plain)
    Letters.asked.clear()
    resumed = Letters(batch_size=3).run([tiny_llada], prompts, tmp_path / "cut")
    assert Letters.asked == [["ffffff", "ggggggg"]]
    xr.testing.assert_identical(resumed.measured["tiny-llada"], full.measured["tiny-llada"])
    assert [file.name for file in resumed.files] == [file.name for file in full.files]
    for one, other in zip(full.files, resumed.files, strict=True):
        if one.suffix not in (".nc", ".json"):  # HDF5 writes its own times, and a manifest the batch
            assert one.read_bytes() == other.read_bytes(), one.name


def test_groups_are_a_coordinate_of_the_measurements_and_do_not_start_a_study_again(tiny_llada, tmp_path):
    found = Letters().run([tiny_llada], ["a", "bb", "ccc"], tmp_path, group=["x", "y", "x"])
    assert found.measured["tiny-llada"]["prompt_group"].values.tolist() == ["x", "y", "x"]
    assert found.manifest["groups"] == {"x": 2, "y": 1}
    asked = len(Letters.asked)
    again = Letters().run([tiny_llada], ["a", "bb", "ccc"], tmp_path, group=["x", "x", "x"])
    assert len(Letters.asked) == asked
    assert again.measured["tiny-llada"]["prompt_group"].values.tolist() == ["x"] * 3


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
    Letters(batch_size=3).run([tiny_llada], ["a", "bb"])
    assert Letters.asked == [["a"], ["bb"]]


@pytest.mark.parametrize(
    ("change", "prompts"), [({"seed": 1}, "ab"), ({"settings": {"steps": 8}}, "ab"), ({}, "abc"), ("code", "ab")]
)
def test_units_of_another_study_prompt_or_code_are_not_used(change, prompts, tiny_llada, tmp_path, monkeypatch):
    Letters(batch_size=1).run(tiny_llada, ["a", "b"], tmp_path)
    Letters.asked.clear()
    if change == "code":
        monkeypatch.setattr(study, "_code_hash", lambda: "another")
        change = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Letters(**change).run(tiny_llada, [*prompts], tmp_path)
    assert Letters.asked == [[*prompts]]
    replaced = r"holds another run of this study (tiny-llada; prompts: 2), which this run will replace; to keep it"
    assert any(replaced in str(one.message) for one in caught) == bool(change or prompts == "abc")
    for broken in ("{", "[]", '{"prompts": 2, "models": [], "options": 3}'):
        (tmp_path / "letters.json").write_text(broken)
        Letters().run(tiny_llada, ["a"], tmp_path)


def test_the_manifest_records_what_determines_the_numbers(tiny_llada, tiny_llama, tmp_path):
    prompts = ["a", "b"]
    study = Letters(seed=3, length=8 + tiny_llada.encode(prompts).ids.shape[1], settings={"steps": 4})
    found = study.run([tiny_llada, tiny_llama], prompts, tmp_path)
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
        (lambda model: Letters(batch_size=0), r"batch_size must be an integer of at least 1; got 0"),
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
        (lambda model: Letters(length=1).run([model], ["a"]), r"tiny-llada: .* longest prompt takes 2 of"),
        (
            lambda model: Letters(length=9, settings={"gen_length": 4}).run([model], ["a"]),
            r"length and gen_length both set the length",
        ),
        (lambda model: Letters(settings={"stpes": 4}).run([model], ["a"]), r"'stpes'. Nearest: steps"),
        (lambda model: Letters(settings={"alg": "entropy"}).run([model], ["a"]), r"none of these models .* 'alg'"),
        (lambda model: Letters(settings={"steps": 99}).run([model], ["a"]), r"steps 99 is more than gen_length 24"),
        (
            lambda model: Letters().run([model], ["a", "bb"], group=["x"]),
            r"group has one label for each of the 2 prompts; got \['x'\]",
        ),
        (lambda model: find("nowhere.py"), r"no such file: .*nowhere\.py"),
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

    changed = USER_STUDY.replace("len(prompt)", "len(prompt) + 1")
    assert _source_hash(cell(1, USER_STUDY)) == _source_hash(cell(2, USER_STUDY)) != _source_hash(cell(3, changed))
