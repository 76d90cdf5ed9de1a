"""How well a run answers over the course of its training, from the weights it kept.

Each kept ``weights-<step>.pt``, and the finished state, is written as a checkpoint into a temporary folder and scored.
What counts as a score is the caller's: for the word problems `sinklens.analyses.accuracy.measure`, for captioned
pictures `picture_accuracy`.

One way this fails: the records of an older run in the same folder stand for the new one's. Delete ``accuracy.jsonl``
with the run.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sinklens.errors import SinklensError
from sinklens.tracing import generate
from sinklens.zoo.export import write_checkpoint
from sinklens.zoo.pictures import Picture
from sinklens.zoo.recipes import Recipe

if TYPE_CHECKING:
    from sinklens.model import Model

RESULT = "accuracy.jsonl"


def accuracy_curve(
    recipe: Recipe, run: Path, score: Callable[[Path], Mapping[str, float]]
) -> Iterator[dict[str, float]]:
    """Score every kept copy of a run's weights; yields, and appends to ``accuracy.jsonl`` in `run`, a record for each.

    Steps that the file holds already are not scored again, so an interrupted call goes on where it stopped.

    Args:
        recipe: of the run.
        run: the folder of `train`.
        score: from a checkpoint folder to named numbers, e.g. ``lambda folder: {"problems": measure(folder,
            held_out()).share}``.

    Raises:
        SinklensError: `run` kept no weights.
    """
    kept = _some_kept(recipe, run)
    result = run / RESULT
    done = {json.loads(line)["step"] for line in result.read_text().splitlines()} if result.exists() else set()
    for step, file in kept.items():
        if step in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            scores = score(write_checkpoint(recipe, _weights(file), Path(folder)))
        record = {"step": step, **scores}
        with result.open("a") as out:
            out.write(json.dumps(record) + "\n")
        yield record


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


@dataclass(frozen=True)
class PictureAccuracy:
    """Exact-match accuracy on captioned pictures, in both directions.

    Attributes:
        drawn: captions whose picture was right in every cell.
        described: pictures whose caption was right in every word.
        total: pictures.
    """

    drawn: int
    described: int
    total: int


def picture_accuracy(model: "Model", pictures: Sequence[Picture], batch: int = 100) -> PictureAccuracy:
    """Let `model` draw and describe `pictures` with its own defaults (one token committed per step)."""
    drawn = _exact(model, [picture.to_draw for picture in pictures], batch)
    described = _exact(model, [picture.to_describe for picture in pictures], batch)
    return PictureAccuracy(drawn, described, len(pictures))


def _exact(model: "Model", texts: Sequence[tuple[str, str]], batch: int) -> int:
    """Answers that equal the expected text to the last token before the end token."""
    right = 0
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        answers = generate(model, [prompt for prompt, _ in part], record_sinks=False).answers
        right += sum(answer.text == expected for answer, (_, expected) in zip(answers, part, strict=True))
    return right
