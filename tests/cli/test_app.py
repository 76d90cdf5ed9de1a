"""The command line, called as a user calls it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pandas
import pytest
from asked import PROMPT
from building import NEEDS_BASE
from hostile import HOSTILE
from ledgers import planted_run
from waiting import awaited

import sinklens
from sinklens import SinkTrack
from sinklens.analyses import questions
from sinklens.cli import main
from sinklens.cli.app import COMMANDS, build
from sinklens.cli.options import Loading, Run
from sinklens.evaluation import HARNESS_PROTOCOLS, PROTOCOLS
from sinklens.evaluation.conditions import masking
from sinklens.families import SAMPLERS
from sinklens.families.samplers import setting_help
from sinklens.model.files import find_checkpoint
from sinklens.tasks import held_out
from sinklens.utils.arguments import arguments

COMMAND = [sys.executable, "-m", "sinklens.cli"]


@pytest.mark.extended
@pytest.mark.parametrize(("real", "names", "steps"), [
    ([], ("tiny-llada", "tiny-llama"), 24),
    pytest.param(["--real"], ("smollm2-135m-masked", "smollm2-135m-causal"), 48, marks=NEEDS_BASE),
])  # fmt: skip
def test_demo_shows_both_models_and_writes_the_files_it_lists(real, names, steps, tmp_path, capsys):
    assert main(["demo", *real, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    problem = held_out()[14]
    assert problem.question.split(".")[0] in printed
    assert f"{names[0]} (diffusion, {steps} steps)" in printed
    assert f"{names[1]} (autoregressive" in printed
    written = [f"{name}.{kind}" for name in names for kind in ("html", "sinks.nc")]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["answers.txt", "sinks.png", *written])
    for name in names:
        assert (tmp_path / f"{name}.html").as_uri() in printed
        assert "</html>" in (tmp_path / f"{name}.html").read_text()
    moving, still = (SinkTrack.open(tmp_path / f"{name}.sinks.nc") for name in names)
    assert moving.steps == steps
    assert (tmp_path / "sinks.png").read_bytes().startswith(b"\x89PNG")
    assert str(problem.result) in (tmp_path / "answers.txt").read_text()
    assert still.data.attrs["family"] == "llama"


def test_trace_writes_the_answer_the_track_and_the_figures(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    (tmp_path / "prompt.txt").write_text(PROMPT + r"\n")
    assert main(["trace", "tiny-llada", f"@{tmp_path / 'prompt.txt'}", "--out", str(folder), "--steps", "12"]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["answer.txt", "report.html", "sinks.nc", "sinks.png"]
    track = SinkTrack.open(folder / "sinks.nc")
    positions = 24 + sinklens.load("tiny-llada").encode(PROMPT + r"\n").ids.shape[1]
    assert (track.steps, track.data.sizes["pos"]) == (12, positions)
    assert re.search(rf"{re.escape((folder / 'answer.txt').read_text())}.* write \$'", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--version"], [f"sinklens {sinklens.__version__}"]),
        (["--help"], [f" {name} " for name in COMMANDS]),
        (["models"], ["tiny-llada", "tiny-llama", "dream", "mmada", "a2d-qwen3", "verified:"]),
        (
            ["hooks", "tiny-llada", "--all"],
            [
                "family llada, 4 layers, 104 hook points",
                "blocks.3.attn.hook_pattern",
                "[batch head=6 query key",
            ],
        ),
        (["analyse", "--help"], [f"{name} {question}" for name, question in questions().items()]),
        (
            ["reproduce", "tiny-llada", "--only", "fig9", "table1", "--limit", "3", "--dry-run"],
            ["generations tiny-llada 3 samples x 1 runs", "Table 1, tiny-gsm", "3 samples x 13 runs", "GPU memory by"],
        ),
        (["protocols"], [*PROTOCOLS, *HARNESS_PROTOCOLS]),
        (["protocols", "--model", "llada-1.5"], ["LLaDA-1.5: 0.838"]),
        (
            ["protocols", "mmada-gsm8k"],
            [" unstated which checkpoint ", " run sinklens evaluate Gen-Verse/MMaDA-8B --protocol mmada-gsm8k "],
        ),
    ],
    ids=str,
)
def test_what_a_command_prints(arguments, texts, capsys):
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert [text for text in texts if text not in f"{printed} "] == []
    assert "--model" not in arguments or "Dream" not in printed
    assert "--all" not in arguments or len(re.findall(r"\S*hook_\S* \[", printed)) == 104


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["hooks", "tiny-lada"], "Nearest: tiny-llada"),
        (["hooks", ""], "'' is neither a folder nor a shipped checkpoint"),
        (["trace", "tiny-llada", "--prompt", "", "--out", "x"], "the prompt is empty"),
        (["trace", "tiny-llada", "--prompt", "@/no/such/file", "--out", "x"], "could not read the prompt"),
        (
            ["trace", "tiny-llada", "--prompt", "@/no/such/file.jsonl", "--out", "x"],
            "this is JSON Lines; give a text file",
        ),
        (
            ["trace", "tiny-llada", "--prompt", "a", "--out", "x", "--alg", "entropy"],
            "belongs to the dream, dream-blocks and open-dcoder samplers",
        ),
        (["trace", "tiny-llada", "--prompt", "a", "--out", "x", "--block-length", "7"], "does not divide"),
        (["trace", "tiny-llada", "--prompt", "a", "--out", "x", "--sampler", "sdar"], "sdar sampler fits block-causal"),
        (["trace", "tiny-llada", "--prompt", "a", "--out", "x", "--mode", "diffusion"], "which decode in one way"),
        (["trace", "tiny-llada", "--prompt", "a", "--out", "x", "--cache", "duel"], "no cache policy is called 'duel'"),
        (["protocols", "mmada-gsm8"], "Nearest: mmada-gsm8k"),
        (["protocols", "--model", "no such model"], "no protocol has a published score of a model"),
        (["analyse", "existence", "tiny-llama", "--limit", "501"], "give 0 to 500 held-out problems, as further ones"),
        (["analyse", "existence", "tiny-llama", "--group", "author"], "--group names a key of the lines of a file"),
        (["analyse", "existence", "tiny-llama", "--seeds"], "give at least two models"),
        (["table", "none"], "no such folder: "),
        (["table", "."], "holds neither an evaluation nor a finished study;"),
        (["analyse", "dynamic", "tiny-llada"], "Nearest: dynamics"),
        (["analyse", "existence", "tiny-lada"], "Nearest: tiny-llada"),
        (["analyse", "existence", "tiny-llada", "--limit", "0"], "limit is 0; give the number of samples"),
        (
            ["analyse", "existence", "tiny-llada", "--batch-size", "0"],
            "batch_size must be an integer of at least 1",
        ),
        (["analyse", "existence", "tiny-llada", "--alg", "entropy"], "none of these models has a setting 'alg'"),
        (["analyse", "existence", "tiny-llada", "tiny-llada"], "each model can be given only once"),
        (["analyse", "existence", "tiny-llada", "--prompts", "/no/such/file"], "could not read"),
        (["reproduce"], "name at least one model, such as tiny-llada"),
        (["reproduce", "tiny-llada", "--only", "fig11"], "no item is called 'fig11'; known: table1, table2,"),
        (["reproduce", "--resume"], "sinklens-reproduce/reproduce.json cannot be read"),
        (["reproduce", "tiny-llada", "--resume"], "--resume takes the models and options of OUT"),
    ],
)
def test_an_error_prints_one_message_and_exits_with_code_one(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    captured = capsys.readouterr().err
    assert text in captured
    assert captured.startswith("sinklens: ")
    assert "Traceback" not in captured
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tracee"], 'Unknown command "tracee". Did you mean "trace"?'),
        (["trace", "m", "--prompt", "x", "--gen-lenght", "3"], "Unknown option: --gen-lenght. Did you mean --gen-leng"),
        (["hooks", "tiny-llada", "--al"], "Unknown option: --al. Did you mean --all?"),  # no abbreviations
        (["trace", "m"], 'Command "trace" parameter --prompt requires an argument'),
        (["lab", "m", "--compare"], 'Command "lab" parameter --compare requires at least 1 element'),
        (["evaluate", "m", "--batch-size", "1.5"], "Invalid value for --batch-size: must be an integer; got '1.5'"),
        *(
            (
                [*call, "--seed", seed],
                f"Invalid value for --seed: seed must be an integer from 0 to 2**63 - 1; got {seen}.",
            )
            for call in (["trace", "m", "--prompt", "x"], ["analyse", "existence", "m"], ["evaluate", "m"])
            for seed, seen in (("9" * 20, "9" * 20), ("-1", "'-1'"), ("1.5", "'1.5'"))
        ),
        (["evaluate", "m", "--queries", "any"], 'Invalid value "any" for --queries. Choose from: "newest", "all"'),
    ],
)
def test_an_option_that_cannot_be_parsed_exits_with_code_two_and_names_the_help(arguments, text, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"sinklens: {text}")
    assert "`sinklens COMMAND --help` the options of one." in printed


def test_help_explains_every_sampler_setting():
    found = {option.name: option.parameter.help for option in options_of("trace")}
    owners = re.match(r"\[(.*?)\] blocks of this length", found["--block-length"])
    assert owners is not None
    assert owners.group(1).split(", ") == [name for name in SAMPLERS if "block_length" in SAMPLERS[name].settings()]
    assert found["--alg-temp"].startswith("[dream, open-dcoder] temperature for choosing positions")
    for name, argument in {
        name: one for sampler in SAMPLERS.values() for name, one in sampler.settings().items()
    }.items():
        if argument.type in (bool, int, float, str) or argument.choices:
            assert setting_help(name) in found[f"--{name.replace('_', '-')}"]
            assert len(setting_help(name).partition("]")[2]) > 10, name


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("tiny-llada", "--sampler dream --alg topk_margin", {"sampler": "dream", "alg": "topk_margin"}),
        ("tiny-llada", "--block-length 2", {"sampler": "llada", "block_length": 2}),
        ("tiny-sdar", "--block-length 2", {"sampler": "sdar", "block_length": 2}),
        ("two modes", "--mode diffusion --block-length 2 --threshold 0.5", {"sampler": "nemotron-diffusion"}),
    ],
)
def test_options_choose_the_sampler_the_mode_and_the_length_of_blocks(model, options, expected, two_modes, tmp_path):
    """The length of blocks loads a block-causal model, and is a setting of the sampler of any other."""
    asked = ["trace", str(two_modes) if model == "two modes" else model, "--prompt", "Tom has 5.", "--gen-length", "4"]
    assert main([*asked, *options.split(), "--out", str(tmp_path / "out")]) == 0
    attrs = SinkTrack.open(tmp_path / "out" / "sinks.nc").data.attrs
    assert ({"sampler": attrs["sampler"]} | json.loads(attrs["settings"])).items() >= expected.items()


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_partial_file_and_exits_with_code_130(tmp_path, number):
    """A real process, interrupted while it runs."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, "demo", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    first = out / "tiny-llada.sinks.nc"  # the first model has finished, the second has not
    awaited(lambda: first.exists() or process.poll() is not None, lambda: "no file", seconds=120)
    assert process.poll() is None
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()[-500:]
    assert b"interrupted" in errors
    assert {file.name for file in out.iterdir()} <= {"tiny-llada.sinks.nc", "tiny-llama.sinks.nc"}
    assert SinkTrack.open(out / "tiny-llada.sinks.nc").steps == 24


def options_of(command):
    return [
        one for one in build()[command].assemble_argument_collection(parse_docstring=True) if one.name.startswith("--")
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_default_of_every_option(command):
    for option in options_of(command):
        stated = "default" in (option.parameter.help or "")
        assert stated or option.required or option.field_info.default not in (None, (), option.field_info.empty), option


LOADING = {"--dtype", "--device", "--device-map", "--revision", "--family", "--block-length", "--adapter"}
RUN = {"--seed", "--chat", "--cache"}


@pytest.mark.parametrize("command", ["trace", "analyse", "evaluate", "lab"])
def test_every_command_that_loads_or_runs_a_model_has_the_options_for_it(command):
    names = {option.name for option in options_of(command)}
    assert names >= LOADING
    assert command == "lab" or names >= RUN  # the lab asks for those of a run in its form
    (out,) = (option for option in options_of(command) if option.name == "--out") if command != "lab" else (None,)
    assert out is None or out.field_info.default == Path(f"sinklens-{command}")


@pytest.mark.parametrize(("group", "function"), [(Loading, sinklens.load), (Run, sinklens.generate)])
def test_an_option_has_the_name_the_type_and_the_default_of_its_argument(group, function):
    declared = arguments(function)
    for name, kind in get_type_hints(group, include_extras=True).items():
        argument, option = declared[name], kind.__metadata__[-1]
        assert kind.__origin__ is (argument.type if argument.type in (bool, int, float) else str), name
        assert argument.default in (None, False) or f"(default: {argument.default}" in option.help, name


OUTS = {
    "demo": ["demo"],
    "trace": ["trace", "tiny-llada", "--prompt", "Question: 1", "--gen-length", "4"],
    "analyse": ["analyse", "existence", "tiny-llada", "--limit", "1", "--gen-length", "4"],
    "evaluate": ["evaluate", "tiny-llada", "--task", "tiny-gsm", "--limit", "1", "--gen-length", "4"],
    "reproduce": ["reproduce", "tiny-llada", "--limit", "1"],
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("command", OUTS)
def test_the_folder_for_results_is_checked_before_the_run(command, capsys, tmp_path, monkeypatch):
    """With a stand-in for the model, which fails when it is reached; a module first imported now would keep it."""
    monkeypatch.chdir(tmp_path)
    for place in (
        "evaluation.units", "analyses.study", "analyses.reproduce", "experiments.sweeps", "runs.session", "model",
    ):  # fmt: skip
        monkeypatch.setattr(f"sinklens.{place}.load", lambda *given, **more: pytest.fail("the run began"))
    Path("file").write_text("")
    Path("another").mkdir()
    Path("another", "units", "run-1").mkdir(parents=True)
    Path("another", "units", "run-1", "run.json" if command != "analyse" else "x").write_text("{}")
    Path("another", "state.pt" if command == "analyse" else "x").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for out, text in (
        ("file", "cannot write to "), ("/proc/no/such", "cannot write to /proc"), ("another", "another holds a "),
    ):  # fmt: skip
        assert main([*OUTS[command], "--out", out]) == 1
        assert capsys.readouterr().err.startswith(f"sinklens: {text}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.extended
def test_output_that_cannot_be_written_is_one_message(tmp_path):
    """A real limit: standard output is a file that cannot grow beyond 100 bytes."""
    code = """
import resource, signal, sys
from sinklens.utils.arguments import arguments
from sinklens.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # Python would keep the truncated files and fail on them later
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
sys.exit(main(["models"]))
"""
    with (tmp_path / "printed").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "sinklens: [Errno 27] File too large.\n")


def test_an_interrupt_during_imports_is_one_message(capsys, monkeypatch):
    monkeypatch.setattr("sinklens.cli.app.build", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "sinklens: interrupted; unfinished files were discarded.\n"


@pytest.mark.extended
def test_a_closed_output_pipe_loses_no_file(tmp_path):
    command = f"{sys.executable} -m sinklens.cli demo --out {tmp_path} | head -n 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all((tmp_path / name).is_file() for name in ("sinks.png", "answers.txt"))


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder with a model, a plan, a study and an evaluation of a stranger, each with a hostile name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINKLENS_TESTS", str(tmp_path / "tests"))
    for folder in (HOSTILE, f"{HOSTILE}/tiny-llada"):
        shutil.copytree(find_checkpoint("tiny-llada"), folder)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{HOSTILE} {at}", "expected": HOSTILE, "kind": f"{HOSTILE}{at}"}) + "\n"
            for at in (1, 2)
        )
    )
    plan = {"claim": HOSTILE, "model": HOSTILE, "contrast": {"mask": "sinks"}, "n": 2, "of_interest": 0.1,
            "prompts": "prompts.jsonl", "group": "kind", "settings": {"gen_length": 4, "steps": 2},
            "expect": {"against": 0.05, "between": 0.1}}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for condition in masking([1], ["random"]):
        planted_run(tmp_path / "ledger", {"s": True}, replace(condition, name=HOSTILE + condition.name), model=HOSTILE)
    table = dict.fromkeys(("model", "measure", "=a", HOSTILE, "meaning"), HOSTILE)
    manifest = {"study": "s", "models": [], "options": {}, "tables": ["t"]}
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "s.json").write_text(json.dumps(manifest))
    pandas.DataFrame([table | {"estimate": 1.0, "low": 0.5, "high": 2.0, "prompts": 3}]).to_csv(
        tmp_path / "study" / "s-t.csv", index=False
    )
    return tmp_path


SHORT = ["--gen-length", "4", "--steps", "2"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["hooks", HOSTILE], 0),
        (["hooks", f"no{HOSTILE}"], 1),
        (["plan", HOSTILE, *SHORT], 0),
        (["plan", "tiny-llada", f"--{HOSTILE}"], 2),
        (["protocols", HOSTILE], 1),
        (["table", "ledger"], 0),
        (["table", "study"], 0),
        (["table", HOSTILE], 1),
        (["export", "ledger", "--out", f"{HOSTILE}.jsonl"], 0),
        (["merge", "ledger", "--out", f"{HOSTILE}2"], 0),
        (["trace", HOSTILE, "--prompt", HOSTILE, *SHORT], 0),
        (["test", "plan.json", "--dry-run"], 0),
        pytest.param(["test", "plan.json"], 0, marks=pytest.mark.extended),
        pytest.param(["evaluate", HOSTILE, "--prompts", "prompts.jsonl", *SHORT], 0, marks=pytest.mark.extended),
        pytest.param(["evaluate", HOSTILE, "--task", "tiny-gsm", "--limit", "1", "--dry-run"], 0,
                     marks=pytest.mark.extended),
        pytest.param(["analyse", "existence", HOSTILE, "tiny-llada", "--prompts", "prompts.jsonl", "--seeds", *SHORT],
                     0, marks=pytest.mark.extended),
        pytest.param(["reproduce", f"{HOSTILE}/tiny-llada", "--only", "table1", "fig7", "--limit", "1"], 0,
                     marks=pytest.mark.extended),
        pytest.param(["verify", HOSTILE, "--problems", "2", *SHORT, "--block-length", "4"], 1,
                     marks=pytest.mark.extended),
    ],
    ids=lambda given: " ".join(given).replace(HOSTILE, "HOSTILE") if isinstance(given, list) else None,
)  # fmt: skip
def test_the_text_of_a_stranger_is_escaped_where_it_is_shown(stranger, capsys, arguments, code):
    before = set(stranger.rglob("*"))
    assert main(arguments) == code, capsys.readouterr().err
    captured = capsys.readouterr()
    for printed in (captured.out, captured.err):
        assert [line for line in re.split(r"\n|\r|\x1b\[A", printed) if not line.isprintable()] == []
        assert not re.search(r"^\W*forged", printed, re.MULTILINE)
    for file in {file for file in stranger.rglob("*") if file.is_file()} - before:
        if file.suffix in (".csv", ".md", ".html"):
            text = file.read_text()
            assert [line for line in text.split("\n") if file.suffix != ".html" and not line.isprintable()] == []
            assert not re.search(r"(^|,)\"?=", text, re.MULTILINE) or file.suffix != ".csv"
            assert "<script>x" not in text.replace("\\<script", "") or file.suffix == ".csv"
