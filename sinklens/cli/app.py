"""The command line: ``sinklens demo | trace | lab | analyse | evaluate | score | table | hooks | models | train``.

Exit codes: 0 success; 1 an error explained by the message; 2 a command line that cannot be parsed, with an unknown or
missing option or a value of the wrong form; 130 interrupted. Files are written atomically: an interrupted command
leaves no partial file.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import (
    CommandParser,
    add_cache,
    add_chat,
    add_loading,
    add_seed,
    add_settings,
    loading,
    settings_given,
)
from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.runs.result import Generation
    from sinklens.zoo import Recipe

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
    options, unknown = _parser().parse_known_args(arguments)
    options.call = sys.argv[1:] if arguments is None else list(arguments)
    if unknown:
        known = re.findall(r"--[a-z0-9-]+", options.parser.format_usage())
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}.{nearest(unknown[0], known)}")
    return options


def _parser() -> argparse.ArgumentParser:
    from sinklens.cli.evaluation import add_evaluation
    from sinklens.cli.lab import add_lab
    from sinklens.cli.studies import add_analyse, add_table

    parser = argparse.ArgumentParser(
        prog="sinklens", description="Look inside diffusion language models while they denoise.",
        epilog="Run sinklens COMMAND --help for the options of a command. From Python: sinklens.load, sinklens.trace.",
    )  # fmt: skip
    commands = parser.add_subparsers(
        title="commands",
        required=True,
        metavar="COMMAND",
        parser_class=CommandParser,
    )
    _add_demo(commands)
    _add_trace(commands)
    add_lab(commands)
    add_analyse(commands)
    add_evaluation(commands)
    add_table(commands)
    _add_hooks(commands)
    _add_models(commands)
    _add_train(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # errors about unknown options show this command's usage
    return parser


def _add_demo(commands: Any) -> None:
    text = "trace the shipped models on a held-out problem: watch the answer fill in and the sinks move"
    demo = commands.add_parser("demo", help=text, description=text)
    demo.add_argument(
        "--out", type=Path, default=Path("sinklens-demo"), help="folder for the results (default: %(default)s)"
    )
    demo.add_argument(
        "--problem",
        type=int,
        default=DEMO_PROBLEM,
        metavar="N",
        help="held-out problem, 0 to 499 (default: %(default)s)",
    )
    demo.set_defaults(command=run_demo)


def _add_trace(commands: Any) -> None:
    text = "run a model on a prompt; write the answer, the sink track, a figure and a report"
    trace = commands.add_parser("trace", help=text, description=text)
    trace.add_argument("model", metavar="MODEL", help="shipped name, hub name or folder; see `sinklens models`")
    trace.add_argument("--prompt", required=True, help="the prompt; @FILE reads it from FILE")
    trace.add_argument(
        "--out", type=Path, required=True, help="folder for answer.txt, sinks.nc, sinks.png and report.html"
    )
    add_seed(trace, "random seed")
    add_chat(trace)
    add_loading(trace)
    trace.add_argument("--family", help="family of the checkpoint (default: the one that its config.json names)")
    trace.add_argument(
        "--model-block-length",
        type=int,
        metavar="N",
        help="block length of a block-causal checkpoint (default: the one that its config.json names)",
    )
    add_cache(trace, "reuse keys and values under this cache policy")
    add_settings(trace)
    trace.set_defaults(command=run_trace)


def _add_hooks(commands: Any) -> None:
    text = "list the hook points of a model, with shapes, without loading its weights"
    hooks = commands.add_parser("hooks", help=text, description=text)
    hooks.add_argument("model", metavar="MODEL", help="shipped name, hub name or folder")
    hooks.add_argument("--all", action="store_true", help="list every layer, not one line for all layers (default: no)")
    hooks.set_defaults(command=run_hooks)


def _add_models(commands: Any) -> None:
    text = "list the models that can be loaded, and how far each family was verified"
    commands.add_parser("models", help=text, description=text).set_defaults(command=run_models)


def _add_train(commands: Any) -> None:
    from sinklens.zoo.recipes import RECIPES

    text = "train a shipped model again, or a variant of one; an interrupted run resumes where it stopped"
    train = commands.add_parser("train", help=text, description=text)
    train.add_argument("name", metavar="NAME", help=f"{', '.join(RECIPES)}; or planted: a model with hand-set sinks")
    train.add_argument("--run", type=Path, help="folder of the run, also to resume it (default: runs/NAME)")
    train.add_argument("--out", type=Path, help="folder of the finished checkpoint (default: runs/NAME/checkpoint)")
    train.add_argument("--steps", type=int, help="number of steps, e.g. fewer for a trial (default: the recipe's)")
    train.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="do not train; write the checkpoints that the run has saved so far, as NAME@STEP (default: train)",
    )
    train.add_argument(
        "--run-generated-code",
        action="store_true",
        help="for the model card of a code model: run the functions it writes, in isolation, and score them "
        "(default: no)",
    )
    train.set_defaults(command=run_train)


def run_demo(options: argparse.Namespace) -> None:
    """`sinklens demo`: both twins on one held-out problem."""
    from rich.console import Console

    from sinklens.folders import check_folder
    from sinklens.model import load
    from sinklens.tasks.word_problems import HELD_OUT_SIZE, held_out
    from sinklens.tracing import trace
    from sinklens.views import report, sink_paths, terminal

    if not 0 <= options.problem < HELD_OUT_SIZE:
        raise SinklensError(f"--problem must be between 0 and {HELD_OUT_SIZE - 1}; got {options.problem}.")
    check_folder(options.out, "a demo")
    problem = held_out()[options.problem]
    runs = []
    for name in ("tiny-llada", "tiny-llama"):
        model = load(name)
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

    from sinklens.folders import check_folder
    from sinklens.model import load
    from sinklens.tracing import generate
    from sinklens.views import most_moving_head, report, sink_path, terminal

    prompt = _prompt(options.prompt)
    check_folder(options.out, "a trace")
    model = load(options.model, family=options.family, block_length=options.model_block_length, **loading(options))
    given = settings_given(options)
    run = generate(model, prompt, seed=options.seed, chat_template=options.chat, cache=options.cache, **given)
    assert run.sinks is not None
    _write_text(options.out / "answer.txt", f"{run.text}\n")
    run.sinks.save(options.out / "sinks.nc")
    _write_figure(options.out / "sinks.png", sink_path(run.sinks, *most_moving_head(run.sinks)).figure)
    report(run, options.out / "report.html")
    terminal.show(model, run, Console(highlight=False))
    print(f"\n{run.text}")
    _print_remarks(run)
    print(f"Written to {options.out}/: answer.txt, sinks.nc, sinks.png, report.html.")


def _prompt(given: str) -> str:
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SinklensError(f"could not read the prompt from {given[1:]}: {error}") from error


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
    from sinklens.checkpoints import build_empty, family_of, translate
    from sinklens.checkpoints.files import find_checkpoint, read_config
    from sinklens.hooks import architecture_of
    from sinklens.hooks.tree import HookTree

    folder = find_checkpoint(options.model, None)
    raw = read_config(folder)
    family = family_of(raw, str(folder))
    config = translate(raw, family, str(folder))
    tree = HookTree(build_empty(config, family.model_class), architecture_of(config.model_type))
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
    from sinklens.checkpoints import FAMILIES, shipped_names
    from sinklens.checkpoints.registry import register_installed

    register_installed()
    print("Shipped checkpoints (by name):")
    for name in shipped_names():
        print(f"  {name}")
    print(
        "\nFamilies (by hub name, or a folder with config.json and *.safetensors; code in checkpoints is not executed):"
    )
    for family in FAMILIES:
        kinds = f"model_type {', '.join(family.model_types)}"
        if family.classes:
            kinds += f" or architectures {', '.join(family.classes)}"
        print(f"  {family.name:10s} {kinds}; sampler {family.sampler}\n{'':13s}verified: {family.verified}")


def run_train(options: argparse.Namespace) -> None:
    """`sinklens train`."""
    import dataclasses

    from sinklens.folders import check_folder, require_writable
    from sinklens.zoo import RECIPES, curve, planted_checkpoint, train
    from sinklens.zoo.export import export

    if options.steps is not None and options.steps < 1:
        raise SinklensError(f"--steps must be at least 1; got {options.steps}.")
    if options.name == "planted":
        _refuse_with_planted(options)
        folder = options.out or Path("runs/planted/checkpoint")
        check_folder(folder, "a checkpoint")
        out = planted_checkpoint(folder)
        print(f"Checkpoint in {out}; its weights were set by hand, without training.")
        return
    if options.name not in RECIPES:
        known = [*RECIPES, "planted"]
        raise SinklensError(
            f"no recipe is called {options.name!r}; known: {', '.join(known)}.{nearest(options.name, known)}"
        )
    recipe = RECIPES[options.name]
    if options.steps is not None:
        recipe = dataclasses.replace(recipe, cycles=(options.steps,))
    folder = options.run or Path("runs") / recipe.name
    if options.checkpoints is not None:
        require_writable(options.checkpoints)
        for checkpoint in curve.write_checkpoints(recipe, folder, options.checkpoints):
            print(checkpoint)
        return
    checkpoint_folder = options.out or folder / "checkpoint"
    if checkpoint_folder.resolve() == folder.resolve():
        raise SinklensError(f"--out and --run are both {folder}; a checkpoint needs a folder of its own.")
    check_folder(checkpoint_folder, "a checkpoint")
    for record in train(recipe, folder):
        print(
            f"step {record['step']:.0f}/{recipe.steps}  loss {record['loss']:.4f}  {record['seconds']:.0f} s",
            flush=True,
        )
    out = export(recipe, folder, checkpoint_folder)
    if recipe.windows:
        _score_text(recipe, folder)
    else:
        _score_problems(recipe, folder, out, options.run_generated_code)
    print(f"Checkpoint in {out}")


def _score_text(recipe: "Recipe", folder: Path) -> None:
    """Print the loss on held-out text over the course of a run."""
    from dataclasses import asdict

    from sinklens.zoo import curve
    from sinklens.zoo.text_scores import score_checkpoint

    for record in curve.accuracy_curve(recipe, folder, lambda made: asdict(score_checkpoint(recipe, made))):
        interval = f"[{record['low']:.3f}, {record['high']:.3f}]"
        print(f"held-out text at step {record['step']}: {record['nats']:.3f} {interval} nats per token", flush=True)


def _score_problems(recipe: "Recipe", folder: Path, out: Path, run_generated_code: bool) -> None:
    """Print the accuracy over the course of a run and at its end, and write the model card."""
    from sinklens.zoo import curve
    from sinklens.zoo.export import write_card
    from sinklens.zoo.scores import scores, training_score

    for record in curve.accuracy_curve(recipe, folder, training_score):
        print(f"word problems at step {record['step']}: {record['right']} of {record['total']}", flush=True)
    found = []
    for score in scores(recipe, out, run_generated_code=run_generated_code):
        print(f"{score.what}: {score.accuracy}", flush=True)
        found.append(score)
    write_card(recipe, folder, out, found, curve.read_curve(folder))


def _refuse_with_planted(options: argparse.Namespace) -> None:
    for name in ("run", "steps", "checkpoints", "run_generated_code"):
        if getattr(options, name):
            raise SinklensError(
                f"--{name.replace('_', '-')} has no effect on planted, which is not trained; remove it."
            )


def _write_text(path: Path, text: str) -> None:
    from sinklens.atomic import atomic_write

    with atomic_write(path) as part:
        part.write_text(text)


def _write_figure(path: Path, figure: Any) -> None:
    from sinklens.atomic import atomic_write

    with atomic_write(path) as part:
        figure.savefig(part, dpi=150)
