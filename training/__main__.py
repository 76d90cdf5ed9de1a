"""``python -m training NAME``, from the root of the repository: train a model again, or a variant of one.

Exit codes: 0 success; 1 an error explained by the message; 2 a command line that cannot be parsed; 130 interrupted.
Rerun to resume: the run continues after its last state.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sinklens.errors import SinklensError, nearest
from sinklens.utils.escaping import say
from sinklens.utils.folders import check_folder, require_writable
from training import RECIPES, Recipe, curve, train
from training.export import export, write_card, write_text_card
from training.scores import scores, training_score
from training.text_scores import score_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Train one model and return the exit code."""
    try:
        run(_parser().parse_args(arguments))
    except SinklensError as error:
        say(f"training: {error}", to=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("training: interrupted; run the command again to resume.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m training", allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--run", type=Path, help="folder of the run, also to resume it (default: runs/NAME)")
    parser.add_argument("--out", type=Path, help="folder of the finished checkpoint (default: runs/NAME/checkpoint)")
    parser.add_argument("--steps", type=int, help="number of steps, e.g. fewer for a trial (default: the recipe's)")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="do not train; write the checkpoints that the run has saved so far, as NAME@STEP (default: train)",
    )
    parser.add_argument(
        "--run-generated-code",
        action="store_true",
        help="for the model card of a code model: run the functions it writes, in isolation, and score them "
        "(default: no)",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Train, export and score a model, or write the checkpoints of its run."""
    recipe = _recipe(options.name, options.steps)
    folder = options.run or Path("runs") / recipe.name
    if options.checkpoints is not None:
        require_writable(options.checkpoints)
        for checkpoint in curve.write_checkpoints(recipe, folder, options.checkpoints):
            print(checkpoint)
        return
    out = options.out or folder / "checkpoint"
    if out.resolve() == folder.resolve():
        raise SinklensError(f"--out and --run are both {folder}; a checkpoint needs a folder of its own.")
    check_folder(out, "a checkpoint")
    for record in train(recipe, folder):
        progress = f"step {record['step']:.0f}/{recipe.steps}  loss {record['loss']:.4f}"
        print(f"{progress}  {record['seconds']:.0f} s", flush=True)
    export(recipe, folder, out)
    if recipe.windows:
        _score_text(recipe, folder, out)
    else:
        _score_problems(recipe, folder, out, options.run_generated_code)
    print(f"Checkpoint in {out}")


def _recipe(name: str, steps: int | None) -> Recipe:
    if steps is not None and steps < 1:
        raise SinklensError(f"--steps must be at least 1; got {steps}.")
    if name not in RECIPES:
        raise SinklensError(f"no recipe is called {name!r}; known: {', '.join(RECIPES)}.{nearest(name, RECIPES)}")
    return RECIPES[name] if steps is None else replace(RECIPES[name], cycles=(steps,))


def _score_text(recipe: Recipe, folder: Path, out: Path) -> None:
    """Print the loss on held-out text over the course of a run, and write the model card."""
    for record in curve.accuracy_curve(recipe, folder, lambda made: asdict(score_checkpoint(recipe, made))):
        interval = f"[{record['low']:.3f}, {record['high']:.3f}]"
        print(f"held-out text at step {record['step']}: {record['nats']:.3f} {interval} nats per token", flush=True)
    write_text_card(recipe, folder, out, curve.read_curve(folder))


def _score_problems(recipe: Recipe, folder: Path, out: Path, run_generated_code: bool) -> None:
    """Print the accuracy over the course of a run and at its end, and write the model card."""
    for record in curve.accuracy_curve(recipe, folder, training_score):
        print(f"word problems at step {record['step']}: {record['right']} of {record['total']}", flush=True)
    found = []
    for score in scores(recipe, out, run_generated_code=run_generated_code):
        print(f"{score.what}: {score.accuracy}", flush=True)
        found.append(score)
    write_card(recipe, folder, out, found, curve.read_curve(folder))


if __name__ == "__main__":
    sys.exit(main())
