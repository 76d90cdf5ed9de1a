"""Edges, readers and jumps, against plain passes; all readers together are the ablated value."""

import numpy as np
import pytest
import torch
from building import shared_model
from oracles import POINTS, two_inputs
from path_oracle import brute_force

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import (
    agreement,
    edge_attribution,
    effect,
    jump_undone,
    path_patching_effects,
    read_attribution,
    sink_jumps,
)
from sinklens.experiments.jumps import Jump
from sinklens.interventions import AblateValues, PathPatch
from sinklens.sinks import EpsilonOverMean

SENDERS, RECEIVERS = ["embed", "L0H2", "1_mlp_out"], ["L1H1.k", "L2H0.v", "2_mlp_in", "logits"]
EDGES = [
    ("embed", "L0H1.q"),
    ("L0H2", "L1H1.k"),
    ("0_mlp_out", "1_mlp_in"),
    ("L1H1", "1_mlp_in"),
    ("2_mlp_out", "logits"),
]
ROW, STEP = 1, 2
pytestmark = pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")


@pytest.mark.fast_cases(2)
@torch.no_grad()
def test_patched_edges_equal_plain_passes(oracle):
    """As an effect, whatever the number of edges in a pass, alone, and as a patch."""
    clean, corrupted = two_inputs()
    asked, labels = (oracle.model, clean, corrupted, oracle.bent), {"senders": SENDERS, "receivers": RECEIVERS}
    found = [path_patching_effects(*asked, **labels, **oracle.given, batch_size=size)["effect"] for size in (1, 4, 16)]
    source = {0: oracle.model.run_with_cache(clean, names_filter=POINTS, **oracle.given)[1]}
    base = oracle.bent(oracle(corrupted).logits)
    for sender, receiver in ((one, other) for one in SENDERS for other in RECEIVERS):
        one = path_patching_effects(*asked, senders=sender, receivers=receiver, **oracle.given)["effect"]
        effects = [each.sel(sender=sender, receiver=receiver).item() for each in (*found, one)]
        if (sender, receiver) == ("1_mlp_out", "L1H1.k"):
            assert np.isnan(effects).all()
            continue
        expected = brute_force(oracle.model, corrupted, clean, sender, receiver, passed=oracle.passed)
        assert effects == pytest.approx([float(oracle.bent(expected) - base)] * 4, abs=2e-4)
        patch = PathPatch(sender=sender, receiver=receiver, source=source)
        patched = oracle.model.run_with_hooks(corrupted, patch.hooks_for(oracle.model), **oracle.given)
        assert float(oracle.bent(patched)) == pytest.approx(float(oracle.bent(expected)), abs=1e-4)


@pytest.mark.fast_cases(2)
def test_an_edge_has_the_slope_of_its_patch_towards_the_clean_pass(oracle):
    """Central differences of `PathPatch` with a source a little beside the corrupted pass, in double precision."""
    model, (clean, corrupted) = oracle.model, two_inputs()
    found = edge_attribution(model, clean, corrupted, oracle.bent, **oracle.given)["effect"]
    caches = [model.run_with_cache(ids, names_filter=POINTS, **oracle.given)[1] for ids in (clean, corrupted)]

    @torch.no_grad()
    def towards(share, sender, receiver):
        source = {name: torch.lerp(caches[1][name], caches[0][name], share) for name in POINTS}
        patch = PathPatch(sender=sender, receiver=receiver, source={0: source})
        return oracle.bent(model.run_with_hooks(corrupted, patch.hooks_for(model), **oracle.given)).item()

    for sender, receiver in EDGES:
        slope = (towards(1e-2, sender, receiver) - towards(-1e-2, sender, receiver)) / 2e-2
        assert found.sel(sender=sender, receiver=receiver).item() == pytest.approx(slope, rel=2e-2, abs=5e-5)
    assert np.isnan(found.sel(sender="L1H2", receiver="L1H0.q").item())


@pytest.mark.extended
def test_gradients_along_the_path_rank_the_edges_of_a_trained_model_as_path_patching(tiny_llada):
    """The edges between the heads of layers 0 and 1, where the number is passed on."""
    prompt = "Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:"
    run = sinklens.generate(tiny_llada, prompt, record_sinks=False)
    six, eight = (tiny_llada.to_single_token(text) for text in (" 6", " 8"))
    prompt = torch.arange(run.canvas.shape[2]) < run.prompt_length
    other = run.canvas[:, 20].where(~((run.canvas[:, 20] == six) & prompt), eight)
    place = run.undecided[0, 20].nonzero()[0, 0]
    metric = lambda logits: logits[0, place].log_softmax(-1)[run.canvas[0, -1, place]]  # noqa: E731
    labels = {
        "senders": [f"L0H{head}" for head in range(6)],
        "receivers": [f"L1H{head}.{letter}" for head in range(6) for letter in "qkv"],
    }
    asked = tiny_llada, run.canvas[:, 20], other, metric
    score = agreement(edge_attribution(*asked, ig_steps=8), path_patching_effects(*asked, **labels))["effect"]
    assert score.rank_correlation > 0.8
    assert score.places == 108


@pytest.fixture
def run(oracle):
    return sinklens.generate(oracle.model, [[5, 9, 13], [8, 2, 4]], gen_length=6, steps=4, seed=1)


def canvas_of(run, step):
    return run.canvas[[ROW], step], 0.0 if run.time is None else run.time[ROW, step]


BIDIRECTIONAL = pytest.mark.parametrize("oracle", ["qwen3", "mdlm", "duo", "gidd"], indirect=True)


@pytest.mark.fast_cases(2)
@BIDIRECTIONAL
@torch.no_grad()
def test_readers_of_a_message_read_it_gated(oracle, run):
    layer, head = 0, 1
    ids, time = canvas_of(run, STEP)
    base, at = oracle.of_row(ids, time), f"blocks.{layer}"
    value = base.values[f"{at}.attn.hook_v"][0]
    value = value[:, head * value.shape[1] // base.values[f"{at}.attn.hook_z"].shape[2]]
    pattern = base.values[f"{at}.attn.hook_pattern"][0, head]
    key = int(pattern.sum(0).argmax())
    message = pattern[:, key, None] * (value.mean(0) - value[key])
    change = (message @ oracle.output(layer, head) * base.values.get(f"{at}.adaln.hook_attn_gate", 1.0))[None]
    normed = base.values["blocks.1.hook_resid_mid"] + change
    table = read_attribution(run, STEP, layer, head, row=ROW)
    assert table.attrs["key"] == key
    for name, edit in (
        ("1_mlp_in", {"blocks.1.ln2.hook_normalized": lambda _: oracle.normalized(normed)}),
        ("logits", {"blocks.2.hook_resid_post": lambda x: x + change}),
    ):
        first, second = (
            one.logits[0, run.undecided[ROW, STEP]].double().log_softmax(-1)
            for one in (base, oracle.of_row(ids, time, edit))
        )
        expected = float((first.exp() * (first - second)).sum(-1).mean())
        assert table["kl"].sel(reader=name).item() == pytest.approx(expected, rel=1e-3)
        assert expected > 1e-7


def test_all_readers_together_have_the_effect_of_the_ablated_value(worded):
    model, settings, key, layer = worded(), {"gen_length": 6, "steps": 3}, 2, 1
    where = torch.zeros(1, 1, 1, 1, 10, dtype=torch.bool)
    where[..., key] = True
    for head in (0, None):
        heads = None if head is None else [head]
        ablate = AblateValues(where=where, steps=[STEP], layers=[layer], heads=heads)
        found = effect(model, "w5 w6 w7 w8", ablate, **settings)
        table = read_attribution(found.base, STEP, layer, head, key)
        expected = found.under_replay["kl"][0, STEP].item()
        assert table["kl"].sel(reader="all").item() == pytest.approx(expected, rel=1e-3, abs=1e-9)
        assert expected > 1e-7
    assert table["reader"].values.tolist()[:2] == ["1_mlp_in", "L2H0.q"]


@pytest.mark.fast_cases(2)
@BIDIRECTIONAL
@torch.no_grad()
def test_an_undone_jump_is_that_of_a_plain_pass(oracle, run):
    """The lead of the new key if the head's queries read what the embedding wrote one step before."""
    layer, head = 1, 0
    (before, time_before), (now, time) = (canvas_of(run, step) for step in (STEP - 1, STEP))
    at, entry = f"blocks.{layer}.attn.hook_q", f"blocks.{layer}.hook_resid_pre"

    def lead(edits=None):
        column = oracle.of_row(now, time, edits).values[f"blocks.{layer}.attn.hook_pattern"][0, head].sum(0)
        return float(column[5] - column[2])

    base, source = oracle.of_row(now, time).values, oracle.of_row(before, time_before).values
    stream = base[entry] + source["hook_embed"] - base["hook_embed"]
    moved = oracle.of_row(now, time, {entry: lambda _: stream}).values[at]
    chosen = (torch.arange(moved.shape[2]) == head)[:, None]
    expected = (lead() - lead({at: lambda value: torch.where(chosen, moved, value)})) / 2.0
    jump = Jump(2.0, STEP, layer, head, 2, 5, ROW)
    assert jump_undone(run, jump, "embed", "q") == pytest.approx(expected, abs=1e-4)
    assert jump_undone(run, jump, "embed", "k", positions=[0]) == pytest.approx(0, abs=1e-4)  # the same token


def test_what_has_no_such_edge_reader_or_jump_is_refused(tiny_llada, conformance):
    trained = sinklens.generate(tiny_llada, "Question: Mia has 17 pens. She loses 6. How many are left?\nAnswer:")
    model, asked = shared_model(), (*two_inputs(), lambda logits: logits.sum())
    causal = sinklens.generate(shared_model(causal=True), [[3, 4, 5]], gen_length=2)
    timed, jump = sinklens.load(conformance / "duo"), sink_jumps(trained)[0]
    assert sink_jumps(trained, EpsilonOverMean(1000.0)) == []
    for call, match in [
        (lambda: path_patching_effects(model, *asked, batch_size=0), "batch_size must be an integer of at le"),
        (lambda: path_patching_effects(timed, *asked), "reads the noise level of its canvas; pass time="),
        (lambda: edge_attribution(timed, *asked), "reads the noise level of its canvas; pass time="),
        (lambda: read_attribution(trained, 2, 1, 0, 999), "position 999 does not exist at this step"),
        (lambda: sink_jumps(causal), "sink_jumps needs a run of a diffusion model with recorded sinks"),
        (lambda: jump_undone(trained, jump, letter="v"), "letter must be one of q, k; got 'v'"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
