"""The command line: ``sinklens demo | trace | lab | analyse | evaluate | score | likelihood | table | hooks | …``.

Exit codes: 0 success; 1 an error explained by the message; 2 a command line that cannot be parsed, with an unknown or
missing option or a value of the wrong form; 130 interrupted. Files are written atomically: an interrupted command
leaves no partial file.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import (
    add_former,
    add_loading,
    add_out,
    add_run,
    add_settings,
    loading,
    run_given,
    settings_given,
)
from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

DEMO_PROBLEM = 14


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        options = _read(arguments)
        options.command(options)
        sys.stdout.flush()
    except SinklensError as error:
        print(f"sinklens: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # results have their own errors, so this is from the output or a connection
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        if isinstance(error, BrokenPipeError):  # `sinklens demo | head`: all files are written before printing
            return 0
        print(f"sinklens: {error}.", file=sys.stderr)
        return 1
    return 0


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    call = sys.argv[1:] if arguments is None else list(arguments)
    options, unknown = _parser(next((word for word in call if not word.startswith("-")), "")).parse_known_args(call)
    options.call = call
    if unknown:
        known = re.findall(r"--[a-z0-9-]+", options.parser.format_usage())
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}.{nearest(unknown[0], known)}")
    return options


class _ExactParser(argparse.ArgumentParser):
    """Rejects abbreviated options: ``--prompt`` and ``--prompts`` are different options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def _parser(called: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the options of the command that is `called`; by default of all."""
    parser = argparse.ArgumentParser(
        prog="sinklens", description="Look inside diffusion language models while they denoise.",
        epilog="Run sinklens COMMAND --help for the options of a command. From Python: sinklens.load, sinklens.trace.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('sinklens')}")
    commands = parser.add_subparsers(
        title="commands",
        required=True,
        metavar="COMMAND",
        parser_class=_ExactParser,
    )
    for name, (text, add) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(parser=command)  # errors about unknown options show this command's usage
        if called in (None, name):
            add(command)
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    add_out(demo, "folder for the results")
    demo.add_argument(
        "--problem",
        type=int,
        default=DEMO_PROBLEM,
        metavar="N",
        help="held-out problem, 0 to 499 (default: %(default)s)",
    )
    add_loading(demo, "dtype", "device")
    demo.set_defaults(command=run_demo)


def _add_trace(trace: argparse.ArgumentParser) -> None:
    trace.add_argument("model", metavar="MODEL", help="shipped name, hub name or folder; see `sinklens models`")
    trace.add_argument(
        "--prompt", required=True,
        help="the prompt; @FILE reads it from FILE, from JSON Lines (*.jsonl) with a text or a list of token ids under "
        "'prompt'",
    )  # fmt: skip
    add_out(trace, "folder for answer.txt, sinks.nc, sinks.png and report.html")
    add_settings(trace)
    add_run(trace)
    add_loading(trace)
    add_former(trace, "--model-block-length", "--block-length", "set_block_length")
    trace.set_defaults(command=run_trace)


def _add_hooks(hooks: argparse.ArgumentParser) -> None:
    hooks.add_argument("model", metavar="MODEL", help="shipped name, hub name or folder")
    hooks.add_argument("--all", action="store_true", help="list every layer, not one line for all layers (default: no)")
    add_loading(hooks, "revision", "family", "block_length")
    hooks.set_defaults(command=run_hooks)


def _add_models(models: argparse.ArgumentParser) -> None:
    models.set_defaults(command=run_models)


def run_demo(options: argparse.Namespace) -> None:
    """`sinklens demo`: both twins on one held-out problem."""
    from rich.console import Console

    from sinklens.model import load
    from sinklens.runs import trace
    from sinklens.tasks.word_problems import HELD_OUT_SIZE, held_out
    from sinklens.utils.folders import check_folder
    from sinklens.views import report, sink_paths, terminal

    if not 0 <= options.problem < HELD_OUT_SIZE:
        raise SinklensError(f"--problem must be between 0 and {HELD_OUT_SIZE - 1}; got {options.problem}.")
    check_folder(options.out, "a demo")
    problem = held_out()[options.problem]
    runs = []
    for name in ("tiny-llada", "tiny-llama"):
        model = load(name, **loading(options))
        with trace(model, problem.prompt) as t:
            pass
        assert t.generation.sinks is not None
        t.generation.sinks.save(options.out / f"{name}.sinks.nc")
        runs.append((model, t.generation))
        report(t, options.out / f"{name}.html")
    _write_figure(options.out / "sinks.png", sink_paths([run.sinks for _, run in runs if run.sinks is not None]))
    answers = [f"{model.name}: {run.text.strip()}\n" for model, run in runs]
    _write_text(options.out / "answers.txt", "\n".join([f"{problem.prompt}\n", *answers]))
    console = Console(highlight=False)
    for (model, run), kind in zip(runs, ("diffusion", "autoregressive"), strict=True):
        console.rule(f"{model.name} ({kind}, {run.steps_run} steps)")
        console.print(problem.prompt, markup=False)
        terminal.show(model, run, console)
        console.print(f"Answer: {run.text.strip()}   (correct: {problem.result})\n", markup=False)
    console.print(
        f"Written to {options.out}/: answers.txt, sinks.png (the sinks of both models at every step), the sink "
        f"tracks (open with sinklens.SinkTrack.open), and a page per model to step through:", markup=False,
    )  # fmt: skip
    for model, _ in runs:
        console.print(f"  open {(options.out / f'{model.name}.html').resolve().as_uri()}", markup=False, soft_wrap=True)


def run_trace(options: argparse.Namespace) -> None:
    """`sinklens trace`."""
    from rich.console import Console

    from sinklens.model import load
    from sinklens.runs import generate
    from sinklens.utils.folders import check_folder
    from sinklens.views import most_moving_head, report, sink_path, terminal

    prompt = _prompt(options.prompt)
    check_folder(options.out, "a trace")
    model = load(options.model, **loading(options, options.model))
    run = generate(model, prompt, **run_given(options), **settings_given(options))
    assert run.sinks is not None
    _write_text(options.out / "answer.txt", f"{run.text}\n")
    run.sinks.save(options.out / "sinks.nc")
    _write_figure(options.out / "sinks.png", sink_path(run.sinks, *most_moving_head(run.sinks)).figure)
    report(run, options.out / "report.html")
    terminal.show(model, run, Console(highlight=False))
    print(f"\n{run.text}")
    _print_remarks(run)
    print(f"Written to {options.out}/: answer.txt, sinks.nc, sinks.png, report.html.")


def _prompt(given: str) -> str | list[int]:
    """The prompt of ``--prompt``."""
    if not given.startswith("@"):
        return given
    file = Path(given[1:])
    if file.suffix == ".jsonl":
        from sinklens.tasks.prompts import read_prompts

        prompts = read_prompts(file)
        if len(prompts) > 1:
            raise SinklensError(f"{file} holds {len(prompts)} prompts, and trace runs one; give a file with one line.")
        return prompts[0]
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SinklensError(f"could not read the prompt from {file}: {error}") from error


def _print_remarks(run: "Generation") -> None:
    """Point out an answer that is empty, unfinished or without an end token."""
    for answer in run.answers:
        if answer.empty:
            print("The answer is empty.")
        if answer.masks:
            print(f"{answer.masks} positions are still masked at the end.")
        if not answer.ended:
            print("No end-of-sequence token was generated; try a larger --gen-length.")


def run_hooks(options: argparse.Namespace) -> None:
    """`sinklens hooks`."""
    from sinklens.families import translate
    from sinklens.families.registry import family_of
    from sinklens.hooks import architecture_of
    from sinklens.hooks.tree import HookTree
    from sinklens.model.files import find_checkpoint, read_config
    from sinklens.model.loading import build_empty

    folder = find_checkpoint(options.model, options.revision)
    raw = read_config(folder)
    family = family_of(raw, str(folder), options.family, options.block_length)
    config = translate(raw, family, str(folder))
    tree = HookTree(build_empty(config, family.model_class), architecture_of(config.model_type), family.drawn)
    cfg = tree.cfg
    sizes = {
        "head": cfg.n_heads, "kv_head": cfg.n_key_value_heads, "d_model": cfg.d_model, "d_head": cfg.d_head,
        "d_mlp": cfg.d_mlp, "vocab": cfg.d_vocab, "expert": cfg.num_experts or 0, "k": cfg.experts_per_token or 0,
    }  # fmt: skip
    print(f"{options.model}: family {family.name}, {cfg.n_layers} layers, {len(tree.point_names())} hook points")
    print("\n".join(_hook_lines(tree.parts, sizes, options.all)))


def _hook_lines(parts: Any, sizes: dict[str, int], every: bool) -> list[str]:
    """Lines of the table, by kind or for every layer; `parts` are those of each layer."""
    from sinklens.hooks import names

    def line(name: str, spec: Any) -> str:
        shape = " ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in spec.axes.split())
        return f"{name:36s} [{shape:44s}] {spec.meaning}"

    rows, mixed = names.table(names.merged(parts)), [layer for layer, one in enumerate(parts) if one.experts]
    if not every:
        experts = f"; layers with experts: {', '.join(map(str, mixed))}" if 0 < len(mixed) < len(parts) else ""
        return [f"l: layer, 0 to {len(parts) - 1}{experts}", *(line(name, spec) for name, spec in rows)]
    first = next(place for place, (name, _) in enumerate(rows) if "{l}" in name)
    lines = [line(name, spec) for name, spec in rows[:first]]
    for layer, one in enumerate(parts):
        lines += [line(f"blocks.{layer}.{name}", spec) for name, spec in names.block_specs(one)]
    return lines + [line(name, spec) for name, spec in rows[first:] if "{l}" not in name]


def run_models(options: argparse.Namespace) -> None:
    """`sinklens models`."""
    from sinklens.families import FAMILIES
    from sinklens.families.registry import register_installed
    from sinklens.model.files import shipped_names

    register_installed()
    print("Shipped checkpoints (by name):")
    for name in shipped_names():
        print(f"  {name}")
    print(
        "\nFamilies (by hub name, or a folder with config.json and *.safetensors; code in checkpoints is not executed):"
    )
    for family in FAMILIES.values():
        kinds = f"model_type {', '.join(family.model_types)}"
        if family.classes:
            kinds += f" or architectures {', '.join(family.classes)}"
        print(f"  {family.name:10s} {kinds}; sampler {family.sampler}\n{'':13s}verified: {family.verified}")


def _write_text(path: Path, text: str) -> None:
    from sinklens.utils.atomic import atomic_write

    with atomic_write(path) as part:
        part.write_text(text)


def _write_figure(path: Path, figure: Any) -> None:
    from sinklens.utils.atomic import atomic_write

    with atomic_write(path) as part:
        figure.savefig(part, dpi=150)


def _adding(module: str, function: str) -> Callable[[argparse.ArgumentParser], None]:
    """Adds a command's options by a function that is imported when it is called."""
    return lambda command: getattr(import_module(f"sinklens.cli.{module}"), function)(command)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "demo": (
        "trace the shipped models on a held-out problem: watch the answer fill in and the sinks move",
        _add_demo,
    ),
    "trace": ("run a model on a prompt; write the answer, the sink track, a figure and a report", _add_trace),
    "lab": (
        "open a live lab in the browser: run the model, change the run by pointing, compare, copy as Python",
        _adding("lab", "add_lab"),
    ),
    "analyse": (
        "run a study on one or several models; print its tables; write tables, figures and a manifest",
        _adding("studies", "add_analyse"),
    ),
    "test": (
        "test one claim by a plan that is stored beforehand; print whether it holds",
        _adding("testing", "add_test"),
    ),
    "evaluate": (
        "measure the accuracy of models on a task, unmasked and with sinks masked; finished samples are skipped",
        _adding("evaluation", "add_evaluate"),
    ),
    "plan": (
        "print what a run takes, from config.json alone: memory by part, time on named cards, which cards hold it",
        _adding("run_plan", "add_plan"),
    ),
    "verify": (
        "check a checkpoint that you have: fingerprint, size, self-check, accuracy, the study's statements; write a "
        "report to paste",
        _adding("verify", "add_verify"),
    ),
    "protocols": (
        "list the protocols: settings of published scores, with the scores and their sources",
        _adding("protocols", "add_protocols"),
    ),
    "score": (
        "run the programs that models wrote, each in isolation, and record whether they are right",
        _adding("evaluation", "add_score"),
    ),
    "merge": (
        "copy the records of evaluations, such as those of several machines, into one folder; rerun to resume",
        _adding("evaluation", "add_merge"),
    ),
    "export": (
        "write every record of an evaluation, with the run that it belongs to, as a line of JSON",
        _adding("evaluation", "add_export"),
    ),
    "likelihood": (
        "multiple choice by likelihood: accuracy and log-likelihood of the right answer, with sinks masked",
        _adding("likelihood", "add_likelihood"),
    ),
    "table": (
        "print the tables of results from `sinklens evaluate` or `sinklens analyse`, with intervals",
        _adding("studies", "add_table"),
    ),
    "hooks": ("list the hook points of a model, with shapes, without loading its weights", _add_hooks),
    "models": ("list the models that can be loaded, and how far each family was verified", _add_models),
}
