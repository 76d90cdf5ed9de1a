"""How well a run answers over the course of its training, from the weights it kept.

Each kept ``weights-<step>.pt``, and the finished state, is written as a checkpoint into a temporary folder and scored.
What counts as a score is the caller's; the cards have that of `sinklens.zoo.scores.on_the_way`.

One way this fails: the records of an older run in the same folder stand for the new one's. Delete ``accuracy.jsonl``
with the run.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from sinklens.errors import SinklensError
from sinklens.zoo.export import LAST_WRITTEN, write_checkpoint
from sinklens.zoo.recipes import Recipe
from sinklens.zoo.run_files import append_record, read_records, read_tensors

RESULT = "accuracy.jsonl"


def accuracy_curve(
    recipe: Recipe, run: Path, score: Callable[[Path], Mapping[str, int | float]]
) -> Iterator[dict[str, int | float]]:
    """Score every kept copy of a run's weights; yields, and appends to ``accuracy.jsonl`` in `run`, a record for each.

    Steps that the file holds already are not scored again, so an interrupted call goes on where it stopped.

    Args:
        recipe: of the run.
        run: the folder of `train`.
        score: from a checkpoint folder to named numbers, e.g. `on_the_way`.

    Raises:
        SinklensError: `run` kept no weights.
    """
    kept = _some_kept(recipe, run)
    result, done = run / RESULT, read(run)
    for step, file in kept.items():
        if step in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            scores = score(write_checkpoint(recipe, _weights(file), Path(folder)))
        record = {"step": step, **scores}
        append_record(result, record)
        yield record


def read(run: Path) -> dict[int, dict[str, int | float]]:
    """The records that `accuracy_curve` has left in `run`, by step; none if it was not called."""
    return {record["step"]: record for record in read_records(run / RESULT)}


def write_checkpoints(recipe: Recipe, run: Path, out: Path) -> list[Path]:
    """Write every kept copy of a run's weights as a checkpoint, ``out/NAME@STEP``; those that are there whole are kept.

    Raises:
        SinklensError: `run` kept no weights, or some that are not whole.
    """
    written = []
    for step, file in _some_kept(recipe, run).items():
        folder = out / f"{recipe.name}@{step}"
        if not (folder / LAST_WRITTEN).exists():
            _write_whole(recipe, _weights(file), folder)
        written.append(folder)
    return written


def _write_whole(recipe: Recipe, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a checkpoint beside its place and move it there; a kill leaves a hidden folder at most."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        write_checkpoint(recipe, weights, part)
        if folder.exists():  # and is not whole; what else is in it stays
            for file in sorted(part.iterdir(), key=lambda file: file.name == LAST_WRITTEN):
                file.replace(folder / file.name)
        else:
            part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _some_kept(recipe: Recipe, run: Path) -> dict[int, Path]:
    kept = _kept(recipe, run)
    if not kept:
        raise SinklensError(f"{run} holds no weights-<step>.pt; train first: sinklens train {recipe.name} --run {run}")
    return kept


def _weights(file: Path) -> dict[str, torch.Tensor]:
    loaded = read_tensors(file)
    return loaded["model"] if file.name == "state.pt" else loaded


def _kept(recipe: Recipe, run: Path) -> dict[int, Path]:
    """Step -> file, in order of the steps; the state of a finished run is that of its last step."""
    found = {int(file.stem.removeprefix("weights-")): file for file in run.glob("weights-*.pt")}
    state = run / "state.pt"
    if state.is_file() and read_tensors(state)["step"] == recipe.steps:
        found[recipe.steps] = state
    return dict(sorted(found.items()))
