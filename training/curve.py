"""The accuracy of a run over the course of its training, from the weights it kept.

Each kept ``weights-<step>.pt``, and the finished state, is written as a checkpoint into a temporary folder and scored.
The caller provides the score; the model cards use `training.scores.training_score`.

Pitfall: records of an older run in the same folder are taken for those of the new run. Delete ``accuracy.jsonl``
together with the run.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from sinklens.errors import SinklensError
from training.export import LAST_WRITTEN, write_checkpoint
from training.recipes import Recipe
from training.run_files import append_record, read_records, read_tensors

RESULT = "accuracy.jsonl"


def accuracy_curve(
    recipe: Recipe, run: Path, score: Callable[[Path], Mapping[str, int | float]]
) -> Iterator[dict[str, int | float]]:
    """Score every kept copy of a run's weights; yield a record for each and append it to ``accuracy.jsonl`` in `run`.

    Call it again to resume after an interruption: steps that the file already contains are skipped.

    Args:
        recipe: the recipe of the run.
        run: the folder of `train`.
        score: checkpoint folder -> named numbers, e.g. `training_score`.

    Raises:
        SinklensError: `run` has no kept weights.
    """
    kept = _required_weights(recipe, run)
    result, done = run / RESULT, read_curve(run)
    for step, file in kept.items():
        if step in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            scores = score(write_checkpoint(recipe, _read_weights(file), Path(folder)))
        record = {"step": step, **scores}
        append_record(result, record)
        yield record


def read_curve(run: Path) -> dict[int, dict[str, int | float]]:
    """The records that `accuracy_curve` wrote in `run`, by step; empty if it was not called."""
    return {record["step"]: record for record in read_records(run / RESULT)}


def write_checkpoints(recipe: Recipe, run: Path, out: Path) -> list[Path]:
    """Write every kept copy of a run's weights as a checkpoint, ``out/NAME@STEP``; skip those that are complete.

    Raises:
        SinklensError: `run` has no kept weights, or a file of weights is truncated or corrupt.
    """
    written = []
    for step, file in _required_weights(recipe, run).items():
        folder = out / f"{recipe.name}@{step}"
        if not (folder / LAST_WRITTEN).exists():
            write_checkpoint(recipe, _read_weights(file), folder)
        written.append(folder)
    return written


def _required_weights(recipe: Recipe, run: Path) -> dict[int, Path]:
    kept = _kept_weights(recipe, run)
    if not kept:
        raise SinklensError(
            f"{run} contains no weights-<step>.pt; train first: python -m training {recipe.name} --run {run}"
        )
    return kept


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    loaded = read_tensors(file)
    return loaded["model"] if file.name == "state.pt" else loaded


def _kept_weights(recipe: Recipe, run: Path) -> dict[int, Path]:
    """Step -> file, in order of steps; the state of a finished run counts as its last step."""
    found = {int(file.stem.removeprefix("weights-")): file for file in run.glob("weights-*.pt")}
    state = run / "state.pt"
    if state.is_file() and read_tensors(state)["step"] == recipe.steps:
        found[recipe.steps] = state
    return dict(sorted(found.items()))
