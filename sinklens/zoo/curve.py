"""How well a run answers over the course of its training, from the weights it kept.

Each kept ``weights-<step>.pt``, and the finished state, is written as a checkpoint into a temporary folder and scored.
What counts as a score is the caller's; the cards have that of `sinklens.zoo.scores.on_the_way`.

One way this fails: the records of an older run in the same folder stand for the new one's. Delete ``accuracy.jsonl``
with the run.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from sinklens.errors import SinklensError
from sinklens.zoo.export import write_checkpoint
from sinklens.zoo.recipes import Recipe

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
        with result.open("a") as out:
            out.write(json.dumps(record) + "\n")
        yield record


def read(run: Path) -> dict[int, dict[str, int | float]]:
    """The records that `accuracy_curve` has left in `run`, by step; none if it was not called."""
    result = run / RESULT
    records = map(json.loads, result.read_text().splitlines()) if result.exists() else ()
    return {record["step"]: record for record in records}


def write_checkpoints(recipe: Recipe, run: Path, out: Path) -> list[Path]:
    """Write every kept copy of a run's weights as a checkpoint, ``out/NAME@STEP``; those that are there are kept.

    Raises:
        SinklensError: `run` kept no weights.
    """
    written = []
    for step, file in _some_kept(recipe, run).items():
        folder = out / f"{recipe.name}@{step}"
        if not (folder / "model.safetensors").exists():
            write_checkpoint(recipe, _weights(file), folder)
        written.append(folder)
    return written


def _some_kept(recipe: Recipe, run: Path) -> dict[int, Path]:
    kept = _kept(recipe, run)
    if not kept:
        raise SinklensError(f"{run} holds no weights-<step>.pt; train first: sinklens train {recipe.name} --run {run}")
    return kept


def _weights(file: Path) -> dict[str, torch.Tensor]:
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    return loaded["model"] if file.name == "state.pt" else loaded


def _kept(recipe: Recipe, run: Path) -> dict[int, Path]:
    """Step -> file, in order of the steps; the state of a finished run is that of its last step."""
    found = {int(file.stem.removeprefix("weights-")): file for file in run.glob("weights-*.pt")}
    state = run / "state.pt"
    if state.is_file() and torch.load(state, weights_only=True, map_location="cpu")["step"] == recipe.steps:
        found[recipe.steps] = state
    return dict(sorted(found.items()))
