"""Accuracy over training: each kept copy of the weights is scored once, with its own weights."""

import json

import pytest
import torch

import sinklens
from training import train
from training.curve import accuracy_curve, write_checkpoints


@pytest.fixture
def run(small, tmp_path):
    list(train(small("tiny-dream"), tmp_path, save_every=2, keep_every=4))
    return tmp_path


def norm(folder):
    """A score that differs between checkpoints."""
    return {"norm": float(sinklens.load(folder).tree.hf.lm_head.weight.detach().norm())}


def test_every_kept_copy_and_the_finished_state_are_scored_once(run, small):
    first = next(accuracy_curve(small("tiny-dream"), run, norm))  # then it is interrupted, and resumes
    records = [first, *accuracy_curve(small("tiny-dream"), run, norm)]
    assert [record["step"] for record in records] == [4, 6]
    kept = torch.load(run / "weights-4.pt", weights_only=True)["lm_head.weight"]
    last = torch.load(run / "state.pt", weights_only=True)["model"]["lm_head.weight"].bfloat16()
    expected = [value.float().norm().item() for value in (kept, last)]
    assert [record["norm"] for record in records] == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[1], rel=1e-6)
    assert [json.loads(line) for line in (run / "accuracy.jsonl").read_text().splitlines()] == records
    assert list(accuracy_curve(small("tiny-dream"), run, norm)) == []


def test_kept_weights_become_checkpoints_named_after_their_step(run, small, tmp_path):
    recipe, out = small("tiny-dream"), tmp_path / "over-training"
    written = write_checkpoints(recipe, run, out)
    assert [folder.name for folder in written] == ["tiny-dream@4", "tiny-dream@6"]
    scores = [norm(folder)["norm"] for folder in written]
    assert scores == [record["norm"] for record in accuracy_curve(recipe, run, norm)]
    complete = (written[0] / "config.json").read_bytes()
    (written[0] / "config.json").write_text("kept")
    assert (write_checkpoints(recipe, run, out), (written[0] / "config.json").read_text()) == (written, "kept")
    (written[0] / "generation_config.json").unlink()  # written last: the checkpoint is incomplete
    assert write_checkpoints(recipe, run, out) == written
    assert (written[0] / "config.json").read_bytes() == complete
    with pytest.raises(sinklens.SinklensError, match=r"contains no weights-<step>.pt"):
        write_checkpoints(recipe, out, out)
