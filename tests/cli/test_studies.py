"""The commands `analyse` and `table` on studies: what an interrupt keeps, what is printed, and what is rejected."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import xarray as xr
from waiting import awaited

from sinklens.analyses import find
from sinklens.analyses.printing import ROWS
from sinklens.cli import main
from sinklens.evaluation import LedgerRun
from sinklens.evaluation.ledger import holds_runs
from sinklens.model.files import find_checkpoint
from sinklens.tasks import held_out

COMMAND = [sys.executable, "-m", "sinklens.cli"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads are 20 times slower beside other processes


def kept(out):
    """Number of prompts in the ledger of a study."""
    if not holds_runs(out / "units"):
        return 0
    (run,) = LedgerRun.all(out / "units")
    return len(run.done())


def start(call):
    return subprocess.Popen(
        [*COMMAND, *call],
        env=ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


def stopped(call, out, more, by):
    """Start `call`, wait for `more` further prompts, and send the signal `by`; returns the exit code and stderr."""
    process, before = start(call), kept(out)
    awaited(lambda: kept(out) >= before + more or process.poll() is not None, lambda: "no prompt", seconds=240)
    assert process.poll() is None, process.communicate()
    process.send_signal(by)
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def test_a_study_that_is_interrupted_and_killed_resumes_with_another_batch(tmp_path):
    """Real processes: every finished prompt is kept, none is measured twice, and the tables are equal."""
    out = tmp_path / "cut"
    call = ["analyse", "definitions", "tiny-llama", "--limit", "8", "--gen-length", "4", "--out", str(out)]
    code, errors = stopped([*call, "--batch-size", "3"], out, 1, signal.SIGINT)
    first = kept(out)
    assert (code, 1 <= first < 8, [file.name for file in out.iterdir()]) == (130, True, ["units"]), errors
    assert f"interrupted; {out} keeps the finished prompts. To resume:\n" in errors
    assert errors.endswith(f"  sinklens {' '.join(call)} --batch-size 3\n")
    assert stopped([*call, "--batch-size", "5"], out, 1, signal.SIGKILL)[0] == -signal.SIGKILL
    second = kept(out)
    assert first < second < 8
    done = start(call)
    printed, errors = done.communicate(timeout=240)
    assert (done.returncode, f"{second}/8" in errors, kept(out)) == (0, True, 8), errors
    study = find("definitions")(settings={"gen_length": 4}, batch_size=8)
    full = tmp_path / "full"
    uninterrupted = study.run("tiny-llama", [problem.prompt for problem in held_out(8)], full)
    written = {file.name: file.read_bytes() for file in full.iterdir() if file.suffix in (".csv", ".svg", ".png")}
    assert written == {name: (out / name).read_bytes() for name in written}
    assert len(written) >= 3
    resumed = xr.load_dataset(out / "definitions.nc", engine="h5netcdf")
    xr.testing.assert_identical(resumed.isel(model=0, drop=True), uninterrupted.measured["tiny-llama"])
    assert "definitions: tiny-llama (8 prompts)" in printed


def test_analyse_writes_its_files_says_where_and_loads_models_as_requested(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(find_checkpoint("tiny-llama", None), tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text("Question: {{ messages[0]['content'] }}\nAnswer:")
    call = ["--limit", "2", "--gen-length", "3", "--seed", "4", "--chat", "--dtype", "float64", "--device", "cpu"]
    assert main(["analyse", "existence", "chatty", *call]) == 0
    tables, _, files = capsys.readouterr().out.partition("existence: 2 prompts, chatty. Written:\n")
    assert "thresholds: chatty (2 prompts)" in tables
    assert [line for line in files.splitlines() if not Path(line.strip()).is_file()] == []
    manifest = json.loads((tmp_path / "sinklens-analyse" / "existence.json").read_text())
    (model,), options = manifest["models"], manifest["options"]
    assert (manifest["prompts"], options["seed"], options["chat_template"]) == (2, 4, True)
    assert (model["settings"]["gen_length"], model["dtype"], model["device"]) == (3, "torch.float64", "cpu")
    assert main(["analyse", "existence", "tiny-llama", "--limit", "1", "--chat", "--out", str(tmp_path / "none")]) == 1
    assert "has no chat template. Leave chat_template (--chat) out" in capsys.readouterr().err


def test_table_prints_what_analyse_printed(tmp_path, capsys):
    out = tmp_path / "out"
    call = ["analyse", "existence", "tiny-llada", "tiny-llama", "--limit", "2", "--gen-length", "3", "--out", str(out)]
    assert main(call) == 0
    printed, errors = capsys.readouterr()
    tables = printed.partition("existence: 2 prompts")[0]
    shown = pandas.read_csv(out / "existence-detectors.csv").groupby("model").head(ROWS)["estimate"].dropna()
    assert len(shown) > 20
    for estimate in shown:
        assert f"{estimate:.3f}" in tables or float(estimate).is_integer() or abs(estimate) < 0.0005
    assert re.search("tiny-llada: 100%.*2/2", errors)
    assert (main(["table", str(out)]), capsys.readouterr().out) == (0, tables)
    assert main(call) == 0  # a rerun measures nothing and prints the same
    assert capsys.readouterr().out == printed


def test_seeds_are_summarised_over_all_models(tmp_path, capsys):
    """Two models stand in for two seeds: every ratio over seeds is the geometric mean of the models'."""
    call = ["analyse", "existence", "tiny-llada", "tiny-llama", "--limit", "2", "--gen-length", "3", "--seeds"]
    assert main([*call, "--out", str(tmp_path)]) == 0
    assert "over 2 seeds and 2 prompts" in capsys.readouterr().out
    table = pandas.read_csv(tmp_path / "existence-seeds.csv")
    each = pandas.read_csv(tmp_path / "existence-detectors.csv")
    ratios = np.log(each[each["measure"] == "value_ratio"].set_index(["model", "detector"])["estimate"].unstack(0))
    rows = table[table["measure"] == "value_ratio"].dropna(subset="estimate")
    assert len(rows) > 3
    for row in rows.itertuples():
        assert np.log(row.estimate) == pytest.approx(ratios.loc[row.detector].mean())
        assert row.low < row.estimate < row.high
    assert {"found", "heads", "value_ratio", "no_op"} <= set(table["measure"])


def own(tmp_path, *lines):
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return ["--prompts", str(tmp_path / "mine.jsonl"), "--gen-length", "4", "--out", str(tmp_path / "out")]


def test_groups_are_read_from_a_column_of_the_prompts_and_the_settings_of_the_study_itself(tmp_path, capsys):
    lines = [{"prompt": f"Ask: {text}", "author": text[0]} for text in ("Ann has 3", "Abe has 4", "Bo has 5")]
    call, of_texts = own(tmp_path, *lines), ["--shares", "0.3", "0.9", "--edits", "0", "--after", "Ask:"]
    assert main(["analyse", "pair", "tiny-llama", *call, *of_texts, "--group", "author"]) == 0
    manifest = json.loads((tmp_path / "out" / "pair.json").read_text())
    given = {"shares": [0.3, 0.9], "edits": 0, "after": "Ask:"}
    assert (manifest["groups"], manifest["options"] | given) == ({"A": 2, "B": 1}, manifest["options"])
    assert main(["analyse", "existence", "tiny-llama", *call, "--edits", "0"]) == 1
    assert "the study existence has no setting edits; only texts and pair do." in capsys.readouterr().err


def test_a_study_of_runs_as_they_are_runs_under_a_policy_and_others_refuse_it(tmp_path, capsys):
    call = ["tiny-llada", "--limit", "1", "--gen-length", "8", "--block-length", "4", "--cache", "dual"]
    assert main(["analyse", "existence", *call, "--out", str(tmp_path)]) == 0
    cached = xr.load_dataset(tmp_path / "existence.nc", engine="h5netcdf")
    assert json.loads((tmp_path / "existence.json").read_text())["options"]["cache"] == "dual"
    exact = find("existence")(settings={"gen_length": 8, "block_length": 4}).run("tiny-llada", [held_out(1)[0].prompt])
    assert not np.array_equal(cached["found"].to_numpy()[0], exact.measured["tiny-llada"]["found"].to_numpy())
    capsys.readouterr()
    assert main(["analyse", "edits", *call, "--out", str(tmp_path / "heads")]) == 1
    assert "the study edits compares exact steps, so it takes no cache policy" in capsys.readouterr().err


def test_content_is_given_the_answers_to_own_prompts(tmp_path, capsys, monkeypatch):
    """Answers under either key reach the study, as texts."""
    from sinklens.analyses.content import Content

    seen = {}

    def run(self, models, prompts, out, progress, group):
        seen.update(answers=self.answers, prompts=prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr(Content, "run", run)
    lines = [{"prompt": "Mine?", "answer": "Yes #### 3"}, {"prompt": "Other?", "answer": 4}]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["analyse", "content", "tiny-llama", *own(tmp_path, *lines)])
    assert seen == {"answers": {"Mine?": "Yes #### 3", "Other?": "4"}, "prompts": ["Mine?", "Other?"]}


def test_a_study_of_right_answers_says_what_a_file_lacks(tmp_path, capsys):
    assert main(["analyse", "content", "tiny-llama", *own(tmp_path, {"prompt": "Mine?"})]) == 1
    said = capsys.readouterr().err
    assert "the study content counts answers lost, and 1 of 1 prompts in " in said
    assert '{"prompt": "Question: ...", "expected": "42"} in a .jsonl file; prompts must be texts.' in said
    assert main(["analyse", "definitions", "tiny-llama", *own(tmp_path, {"prompt": "Mine?"})]) == 0
    assert "Where right answers are counted, they are left out." in capsys.readouterr().err
