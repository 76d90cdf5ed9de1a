"""The warning signs on planted sinks that stay or move, and the hooks compared with patterns of real runs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from planting import planted, with_sinks

import sinklens
from sinklens.analyses.diagnose import (
    SIGNS,
    Diagnose,
    OrdinaryKey,
    anchors,
    at_the_start,
    changed_tokens,
    hiding,
    middle_third,
)
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
NAN = float("nan")


def test_the_ordinary_key_has_the_median_strength_of_those_that_a_head_attends_to():
    score = np.array([0.0, 5.0, 1.0, 0.0, 3.0, 2.0, 4.0])
    found = OrdinaryKey().detect(planted(np.stack([score, 0 * score])[None, None, None]))
    assert found.to_numpy()[0, 0, 0].nonzero()[1].tolist() == [4]


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_a_cut_hides_the_middle_third_of_each_prompt_from_all_queries(name, request):
    model = request.getfixturevalue(name)
    start, end = middle_third(model.encode(PROMPTS)[1])
    run = sinklens.generate(model, PROMPTS, gen_length=4, hooks=hiding(start, end))
    score = run.sinks.scores().isel(step=-1)
    for row in range(2):
        first = int(run.real[row].int().argmax())
        length = run.prompt_length - first
        third = length // 3
        assert (int(start[row]), int(end[row])) == (first + third, first + 2 * third)
        part = score.isel(batch=row)
        assert (part.isel(pos=slice(int(start[row]), int(end[row]))) == 0).all()
        assert (part.isel(pos=slice(first, int(start[row]))).max("pos") > 0).all()


def test_strongest_keys_at_the_start_are_counted_from_the_first_real_token():
    """Row 1 has padding of 2. Heads: always on the first token; on the fourth; on the eighth of twenty."""
    score = np.concatenate([with_sinks([[[0, 3, 7]], [[0, 3, 7]]], length=20)] * 2)
    score[1] = np.roll(score[1], 2, axis=-1)
    real = np.ones((2, 20), dtype=bool)
    real[1, :2] = False
    score[0, 1, 0, 0] = 0  # a head without attention is not counted
    data = at_the_start(planted(score, real=real))
    np.testing.assert_allclose(data["first_four"], [3 / 5, 4 / 6])
    np.testing.assert_allclose(data["first_twentieth"], [1 / 5, 2 / 6])
    np.testing.assert_allclose(data["first_always"], [1 / 3, 1 / 3])
    np.testing.assert_allclose(data["places"].sum("place"), 1)
    assert float(data["places"].isel(prompt=0, place=7)) == pytest.approx(2 / 5)  # position 7 of 20 is at 0.35
    assert float(data["places"].isel(prompt=1, place=7)) == pytest.approx(2 / 6)  # position 7 of 18 is at 0.39


def test_sinks_that_stay_and_sinks_that_move_are_distinguished():
    """Keys 4 and 5 are hidden. Head 0 stays on 1, head 1 leaves 2 for 8, head 2 had its sink on 4, which is hidden."""
    base = planted(with_sinks([[[1, 2, 4]]] * 2))
    cut = planted(with_sinks([[[1, 8, 9]], [[1, 8, 9]]]))
    data = anchors(base, cut, torch.tensor([4]), torch.tensor([6])).isel(prompt=0)
    assert float(data["cut_same"]) == 0.5
    assert float(data["cut_overlap"]) == pytest.approx((1 + 0 + 0) / 3)
    assert float(data["cut_static"]) == 1
    np.testing.assert_allclose(data["kept"], [0.5, *[NAN] * 4, 0.5, *[NAN] * 4])
    same = anchors(base, base, torch.tensor([4]), torch.tensor([6])).isel(prompt=0)
    assert float(same["cut_same"]) == 1
    assert float(same["cut_overlap"]) == 1  # the hidden key is excluded from both


def fake(tokens, lengths, texts=None, prompt_length=2):
    answers = [
        SimpleNamespace(tokens=n, text=text) for n, text in zip(lengths, texts or [""] * len(lengths), strict=True)
    ]
    return SimpleNamespace(tokens=torch.tensor(tokens), prompt_length=prompt_length, answers=answers)


def test_changed_tokens_are_counted_up_to_the_later_end():
    """End token 0. Row 0: one of three positions differs. Row 1: the second answer is longer by two."""
    one = fake([[9, 9, 5, 6, 0, 0, 0], [9, 9, 5, 0, 0, 0, 0]], [2, 1])
    other = fake([[9, 9, 5, 7, 0, -1, -1], [9, 9, 5, 6, 7, 0, 0]], [2, 3])
    np.testing.assert_allclose(changed_tokens(one, other), [1 / 3, 2 / 4])
    assert changed_tokens(one, one).tolist() == [0, 0]


def test_verdicts_follow_threshold_and_interval():
    values = {name: [0.0, 0.1, 0.05, 0.1] * 4 for name in SIGNS}
    values |= {"masking_cost": [1.0, 0, 1, 1] * 4, "first_always": [0.8, 0.9, 0.7, 0.8] * 4, "cut_static": [0, 1.0] * 8}
    data = xr.Dataset({name: ("prompt", np.array(value, dtype=float)) for name, value in values.items()})
    data["right"] = (("prompt", "run"), np.ones((16, 4)))
    signs = Diagnose().tables({"planted": data})["signs"].set_index("measure")
    assert signs.loc["first_always", "verdict"] == "warns"
    assert signs.loc["first_four", "verdict"] == "clear"
    assert signs.loc["cut_static", "verdict"] == "cannot tell"
    assert signs.loc["cut_changed", "verdict"] == ""
    assert signs.loc["masking_cost", ["threshold", "source"]].tolist() == [0.05, "paper"]
    decisive = signs[signs["threshold"].notna() & (signs.index != "masking_cost")]
    assert set(decisive["source"]) == {"ours"}
