"""The circuits study: jumps and controls with planted truth, and both decompositions by hand on a run."""

import numpy as np
import pytest
import torch
import xarray as xr

import sinklens
from sinklens.analyses.circuits import (
    AXES,
    READERS,
    WHERE,
    Circuits,
    carried,
    claims,
    localized,
    mobile,
    nearest,
    neighbours,
    read,
    strongest,
    written,
)
from sinklens.analyses.rewriting import masked_again
from sinklens.experiments import Jump, read_attribution, sink_jumps
from sinklens.experiments.jumps import jumps_between
from sinklens.interventions import Activations, PathPatch
from sinklens.tasks.word_problems import held_out

PROMPT = held_out(1)[0].prompt
JUMP = (1, 0, 34, 18)  # head 1.0 moves from 34 to 18 at step 8


@pytest.fixture(scope="module")
def run(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPT)


def test_jumps_lead_from_sink_to_sink_after_the_first_layer():
    score = np.ones((3, 2, 2, 4))
    score[:, :, 0] = np.array([[5, 1, 4, 1], [4, 1, 6, 1], [4, 1, 6, 1]])[
        :, None
    ]  # both layers, head 0: from 0 to 2 at step 1
    score[:, 1, 1] = [[1, 3, 1, 1], [1, 1, 1, 9], [1, 9, 1, 1]]  # layer 1, head 1: from 1 to 3, and back
    sinks = score > 3.5
    found = jumps_between(score, sinks)
    assert found == [Jump(16.0, 2, 1, 1, 3, 1), Jump(3.0, 1, 1, 0, 0, 2)]  # at step 0, head 1 has no sink
    assert mobile(found) == (1, 1, 0, 2)  # as many jumps each: the first head
    assert strongest(score, sinks) == (1, 1, 1, 3)
    assert mobile([]) == strongest(score, sinks & False) == (-1, -1, -1, -1)


def test_controls_are_the_nearest_free_positions():
    assert nearest(np.array([True, False, False, True]), 1) == 0
    assert nearest(np.zeros(3, dtype=bool), 1) == -1
    assert neighbours(np.array([False, False, True, True, False, False])).tolist() == [1, 4]
    assert neighbours(np.array([False, True, True])).tolist() == [0]  # fewer, where there are no more


def test_the_undone_share_is_that_of_path_patched_runs(tiny_llada, run):
    kept = Activations(names=["hook_embed", "blocks.0.attn.hook_z", "blocks.0.hook_mlp_out"])
    sinklens.generate(tiny_llada, PROMPT, replay=run, hooks=kept)
    layer, head, old, new = JUMP
    lead = [_lead(run, step, layer, head, old, new) for step in (7, 8)]
    (jump,) = [one for one in sink_jumps(run) if one[1:4] == (8, 1, 0)]
    assert jump[4:6] == (old, new)
    assert jump.size == pytest.approx(lead[1] - lead[0], rel=1e-4)
    heads = [f"L0H{number}" for number in range(6)]
    for sender, names, letter, positions in (
        ("head", heads, "q", None),
        ("mlp", ["0_mlp_out"], "k", None),
        ("all", ["embed", *heads, "0_mlp_out"], "q", [37]),
    ):
        patch = PathPatch(sender=names, receiver=f"L1H0.{letter}", source={8: kept.caches[7]}, positions=positions)
        patched = sinklens.generate(tiny_llada, PROMPT, replay=run, hooks=patch)
        expected = lead[1] - _lead(patched, 8, layer, head, old, new)
        assert carried(run, jump, sender, letter, positions) == pytest.approx(expected, abs=1e-4)
    assert carried(run, jump, "all", "q") > 0.9 * jump.size


def test_the_control_carries_what_an_earlier_token_wrote_while_masked(tiny_llada, run):
    layer, head, old, new = JUMP
    (jump,) = [one for one in sink_jumps(run) if one[1:4] == (8, 1, 0)]
    before, now = run.canvas[0, 7], run.canvas[0, 8]
    (place,), canvas = masked_again(tiny_llada, before, now, run.prompt_length)
    assert place != (before != now).nonzero().item()
    names = ["hook_embed", "blocks.0.attn.hook_z", "blocks.0.hook_mlp_out"]
    _, cache = tiny_llada.run_with_cache(canvas[None], names_filter=names)
    senders = ["embed", *(f"L0H{number}" for number in range(6)), "0_mlp_out"]
    patch = PathPatch(sender=senders, receiver="L1H0.q", source={8: dict(cache)}, positions=[int(place)])
    patched = sinklens.generate(tiny_llada, PROMPT, replay=run, hooks=patch)
    local, change = localized(run, [jump])
    lost = _lead(run, 8, layer, head, old, new) - _lead(patched, 8, layer, head, old, new)
    assert local[list(WHERE).index("again")] == pytest.approx(lost / jump.size, abs=1e-4)
    sizes = (tiny_llada.tree.W_E[now] - tiny_llada.tree.W_E[tiny_llada.mask_token_id]).norm(dim=-1)
    expected = [sizes[before != now].item(), 0.0, sizes[place].item()]
    assert change == pytest.approx(expected, abs=1e-4)


def test_a_jump_without_earlier_tokens_to_mask_again_is_in_no_group(run):
    late = Jump(1.0, 8, *JUMP)
    early = late._replace(step=1)
    assert np.isnan(localized(run, [early])).all()
    assert np.array_equal(localized(run, [early, late]), localized(run, [late]))


def _lead(run, step, layer, head, old, new):
    score = run.sinks.scores().to_numpy()[0, step, layer, head]
    return float(score[new] - score[old])


def test_what_wrote_a_key_adds_up_to_the_excess_of_its_score(tiny_llada, run):
    _, cache = tiny_llada.run_with_cache(run.canvas[:, 8], names_filter=["blocks.1.attn.hook_attn_scores"])
    score = cache["blocks.1.attn.hook_attn_scores"][0, 0].detach()
    weight = score.softmax(-1)[:, 18] / score.softmax(-1)[:, 18].sum()
    others = torch.arange(score.shape[1]) != 18
    expected = float(weight @ (score[:, 18] - score[:, others].mean(dim=1)))
    assert written(run, 8, 1, 0, 18).sum() == pytest.approx(expected, rel=1e-3)


def test_the_effects_of_a_message_are_those_of_its_readers(run):
    found = dict(zip(READERS, read(run, 8, 1, 0, 18), strict=True))
    table = read_attribution(run, 8, 1, 0, 18, readers={"keys": [f"L{n}H{k}.k" for n in (2, 3) for k in range(6)]})
    assert found["keys"] == pytest.approx(table["kl"].sel(reader="keys").item(), rel=1e-4)
    assert found["all"] == pytest.approx(table["kl"].sel(reader="all").item(), rel=1e-4)
    assert read(run, 8, 3, 0, 18)[:3].tolist() == [0, 0, 0]  # no head comes after the last layer


def test_a_prompt_is_measured_at_its_largest_jump(tiny_llada, tiny_llama, run):
    data = Circuits(largest=1).measure(tiny_llada, [PROMPT], {})
    found = sink_jumps(run)
    assert float(data["jumps"][0]) == len(found)
    share = carried(run, found[0], "head", "k") / found[0].size
    assert float(data["undone"].sel(letter="k", sender="head")[0]) == pytest.approx(share, abs=1e-4)
    assert {name: data[name].dims[1:] for name in AXES} == {name: tuple(axes) for name, axes in AXES.items()}
    causal = Circuits().measure(tiny_llama, [PROMPT], {})
    assert all(bool(causal[name].isnull().all()) for name in AXES)


def test_a_planted_difference_is_the_only_claim_that_holds():
    coords = {axis: list(labels) for axes in AXES.values() for axis, labels in axes.items()}
    data = xr.Dataset(
        {name: (("prompt", *axes), np.zeros((30, *map(len, axes.values())))) for name, axes in AXES.items()}, coords
    )
    data["local"].loc[{"where": "decided"}] = 0.5 + np.linspace(0, 0.1, 30)
    data["local"].loc[{"where": "again"}] = 0.5 + np.linspace(0.1, 0, 30)
    table = claims({"planted": data}, 0)
    held = table[table["verdict"] == "holds"]
    assert held["claim"].tolist() == ["queries of just decided positions move sinks more than those nearby"]
    assert float(held["estimate"].iloc[0]) == pytest.approx(0.55)
