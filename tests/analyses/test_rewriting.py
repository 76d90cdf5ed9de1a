"""Controls whose embedding changes as much as that of just decided tokens, against a loop and against the run."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.analyses.events import rewritten, written_over
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]  # of different lengths: one row is padded
LENGTH = 8


@pytest.fixture(scope="module")
def run(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPTS, gen_length=LENGTH, steps=LENGTH)


def size(model, one, other):
    """‖e(one) − e(other)‖."""
    return float((model.tree.W_E[one] - model.tree.W_E[other]).detach().norm())


def test_the_decided_token_is_written_over_the_earlier_one_with_the_nearest_change(tiny_llada, run):
    row, start = 0, run.prompt_length
    ids, data = run.canvas[row, :LENGTH], run.sinks.data
    real = run.real[row].numpy()
    states = [data[name][row].to_numpy() for name in ("masked", "committed")]
    found = rewritten(tiny_llada, ids, *states, answer=real & (np.arange(len(real)) >= start))
    assert [one.step for one in found] == list(range(2, LENGTH))  # the first step that has a token decided earlier
    for one in found:
        before, now = ids[one.step - 1], ids[one.step]
        (just,) = np.flatnonzero((now != before).numpy())
        wanted = size(tiny_llada, now[just], tiny_llada.mask_token_id)
        earlier = [pos for pos in range(start, len(before)) if before[pos] not in (tiny_llada.mask_token_id, now[just])]
        miss = {pos: abs(size(tiny_llada, now[just], before[pos]) - wanted) for pos in earlier}
        (place,) = one.places
        assert miss[place] == pytest.approx(min(miss.values()), abs=1e-6)
        assert (one.ids != before).nonzero().flatten().tolist() == [place]
        assert one.ids[place] == now[just]


def test_landings_are_those_of_runs_on_the_rewritten_canvas(tiny_llada, run):
    data = written_over(tiny_llada, run.sinks)
    before = run.sinks.top(1).to_numpy()[..., 0]
    checked = 0
    for row, step, place in np.argwhere(data["written_landed_at"].notnull().to_numpy()):
        canvas, key = run.canvas[row, step - 1].clone(), place + run.prompt_length
        just = (run.canvas[row, step] != canvas).nonzero()[0]
        canvas[key] = run.canvas[row, step, just]
        given = {"input_ids": canvas[None], "attention_mask": run.real[row][None]}
        _, cache = tiny_llada.run_with_cache(given, names_filter=lambda name: name.endswith("hook_pattern"))
        after = torch.stack([cache["pattern", layer][0].sum(-2).argmax(-1) for layer in range(4)]).numpy()
        elsewhere = before[row, step - 1] != key
        assert data["written_at_risk_at"][row, step, place] == elsewhere.sum()
        assert data["written_landed_at"][row, step, place] == (elsewhere & (after == key)).sum()
        checked += 1
    assert checked == 2 * (LENGTH - 2)
    assert data["written_landed_at"].sum() > 0
