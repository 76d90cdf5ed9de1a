"""Attribution, lenses and paths of networks whose blocks and head are modulated by the noise level, in plain torch."""

from functools import cache

import numpy as np
import pytest
import torch
from dit_oracle import PlainDit, rotated
from path_oracle import brute_force

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import (
    LogitLens,
    attribution_patching,
    edge_attribution,
    jump_undone,
    logit_lens,
    patching_effects,
    path_patching_effects,
    read_attribution,
    train_tuned_lens,
    write_attribution,
)
from sinklens.experiments.jumps import Jump
from sinklens.interventions import PathPatch

FOLDERS = ("mdlm", "duo", "gidd")  # three blocks each
TIME = torch.tensor([0.3, 0.8])
PATHS = [
    ("embed", "L0H1.q"),
    ("L0H2", "L1H1.k"),
    ("L0H2", "L2H0.v"),
    ("0_mlp_out", "2_mlp_in"),
    ("L1H1", "1_mlp_in"),
    ("L1H0", "logits"),
    ("1_mlp_out", "logits"),
]
pytestmark = pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")


@cache
def _loaded(folder, dtype="auto"):
    family = "sedd" if folder.name == "sedd" else None
    wide = torch.float64 if dtype == "float64" else torch.float32
    return sinklens.load(folder, dtype=dtype, family=family), PlainDit(folder, wide)


@pytest.fixture(params=FOLDERS)
def pair(request, conformance):
    """A model, and the same network in plain torch."""
    return _loaded(conformance / request.param)


def two_inputs():
    """Two rows of ids, and the same with two tokens changed."""
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(60, (2, 7), generator=drawn)
    other = ids.clone()
    other[0, 1], other[1, 4] = (ids[0, 1] + 7) % 60, (ids[1, 4] + 11) % 60
    return ids, other


def timed(dit, ids, edits=None):
    return dit(ids, TIME, edits)


def close(found, expected, share=2e-5):
    torch.testing.assert_close(found, expected, atol=share * float(expected.abs().max()), rtol=0)


def bent(logits):
    """A nonlinear metric."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weights * logits.log_softmax(dim=-1)).sum() / 50


@pytest.fixture
def run(pair):
    """A run with several steps and rows of one length; Duo's and GIDD's have a noise level that matters."""
    model, _ = pair
    return sinklens.generate(model, [[5, 9, 13], [8, 2, 4]], gen_length=6, steps=4, seed=1)


def canvas_of(run, step, row):
    return run.canvas[[row], step], 0.0 if run.time is None else run.time[row, step]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("sender", "receiver"), PATHS)
@torch.no_grad()
def test_a_patched_path_equals_three_plain_passes(pair, sender, receiver):
    (model, dit), (ids, other) = pair, two_inputs()
    patch = PathPatch(sender=sender, receiver=receiver, source={0: model.run_with_cache(other, time=TIME)[1]})
    found = model.run_with_hooks(ids, fwd_hooks=patch.hooks_for(model), time=TIME)
    expected = brute_force(dit, ids, other, sender, receiver, passed=timed)
    close(found, expected)
    assert (expected - timed(dit, ids).logits).abs().max() > 1e-3 * expected.abs().max()


@torch.no_grad()
def test_effects_of_edges_equal_plain_passes(pair):
    (model, dit), (clean, corrupted) = pair, two_inputs()
    senders, receivers = ["embed", "L0H2", "1_mlp_out"], ["L1H1.k", "2_mlp_in", "logits"]
    chosen = {"senders": senders, "receivers": receivers, "time": TIME}
    found = path_patching_effects(model, clean, corrupted, bent, **chosen)["effect"]
    apart = path_patching_effects(model, clean, corrupted, bent, **chosen, edges_per_pass=1)["effect"]
    np.testing.assert_allclose(found, apart, atol=1e-4)
    base = bent(timed(dit, corrupted).logits)
    for sender, receiver in ((one, other) for one in senders for other in receivers):
        effect = found.sel(sender=sender, receiver=receiver).item()
        if (sender, receiver) == ("1_mlp_out", "L1H1.k"):
            assert np.isnan(effect)
            continue
        expected = bent(brute_force(dit, corrupted, clean, sender, receiver, passed=timed)) - base
        assert effect == pytest.approx(expected.item(), abs=2e-4)


@pytest.mark.parametrize("name", ["duo", "gidd"])
def test_an_edge_has_the_slope_of_its_patch(conformance, name):
    """Central differences of the plain passes in double precision, with a source a little beside the corrupted pass."""
    model, _ = _loaded(conformance / name, "float64")
    clean, corrupted = two_inputs()
    found = edge_attribution(model, clean, corrupted, bent, time=TIME)["effect"]
    with torch.no_grad():
        caches = [model.run_with_cache(ids, time=TIME)[1] for ids in (clean, corrupted)]
    points = ["hook_embed", *(f"blocks.{n}.{p}" for n in range(3) for p in ("attn.hook_z", "hook_mlp_out"))]

    def towards(share, sender, receiver):
        source = {name: torch.lerp(caches[1][name], caches[0][name], share) for name in points}
        patch = PathPatch(sender=sender, receiver=receiver, source={0: source})
        with torch.no_grad():
            return bent(model.run_with_hooks(corrupted, patch.hooks_for(model), time=TIME)).item()

    for sender, receiver in PATHS:
        slope = (towards(1e-2, sender, receiver) - towards(-1e-2, sender, receiver)) / 2e-2
        assert found.sel(sender=sender, receiver=receiver).item() == pytest.approx(slope, rel=1e-2, abs=1e-5)


POINTS = ["attn.hook_z", "hook_resid_post", "mlp.hook_post", "adaln.hook_mlp_gate"]


def test_attribution_patching_is_the_change_times_the_plain_gradient(pair):
    (model, dit), (clean, corrupted) = pair, two_inputs()
    names = [f"blocks.{layer}.{point}" for layer in range(3) for point in POINTS]
    found = attribution_patching(model, clean, corrupted, bent, names, time=TIME)
    with torch.no_grad():
        there = timed(dit, clean).values
    for layer in range(3):
        for point in POINTS:
            name, leaf = f"blocks.{layer}.{point}", {}

            def opened(value, leaf=leaf):
                leaf["value"] = value.detach().requires_grad_()
                return leaf["value"]

            bent(timed(dit, corrupted, {name: opened}).logits).backward()
            expected = (there[name] - leaf["value"].detach()) * leaf["value"].grad
            expected = expected.sum(dim=[0, -1]) if expected.ndim > 2 else expected.sum()
            expected = expected.T if point == "attn.hook_z" else expected
            np.testing.assert_allclose(found[point].sel(layer=layer).to_numpy(), expected.numpy(), atol=5e-5, rtol=1e-4)
    assert np.abs(found["attn.hook_z"]).max() > 1e-4


@torch.no_grad()
def test_patching_effects_equal_plain_passes(pair):
    (model, dit), (clean, corrupted) = pair, two_inputs()
    name = "blocks.1.attn.hook_z"
    found = patching_effects(model, clean, corrupted, bent, [name], time=TIME, heads=[1], positions=[4])
    there = timed(dit, clean).values[name]

    def patched(value):
        value = value.clone()
        value[:, 4, 1] = there[:, 4, 1]
        return value

    expected = bent(timed(dit, corrupted, {name: patched}).logits) - bent(timed(dit, corrupted).logits)
    assert found["attn.hook_z"].item() == pytest.approx(expected.item(), abs=1e-4)


@torch.no_grad()
def test_a_network_that_reads_the_noise_level_needs_it_and_others_refuse_it(pair, tiny_llada):
    model, _ = pair
    if model.config.time_conditioning:
        for experiment in (edge_attribution, path_patching_effects):
            with pytest.raises(SettingError, match="reads the noise level of its canvas; pass time="):
                experiment(model, *two_inputs(), bent)
    with pytest.raises(SettingError, match="not conditioned on the noise level; leave time= out"):
        edge_attribution(tiny_llada, *two_inputs(), bent, time=0.5)


@pytest.mark.parametrize(("layer", "head", "weighted"), [(2, 0, False), (1, 1, True)])
@torch.no_grad()
def test_writers_of_a_score_are_those_of_a_plain_pass(pair, run, layer, head, weighted):
    (_, dit), row, key, step = pair, 1, 2, 2
    values = dit(*canvas_of(run, step, row)).values
    at, scores = f"blocks.{layer}", values[f"blocks.{layer}.attn.hook_attn_scores"][0, head]
    share = scores.softmax(-1)[:, key] if weighted else torch.ones(len(scores))
    share = (share / share.sum())[:, None]
    alone = torch.eye(len(scores))[key].expand_as(scores)
    excess = alone - (1 - alone) / (len(scores) - 1)
    table = write_attribution(run, step, layer, head, key=key, row=row, weighted=weighted)
    shift, scale = (values[f"{at}.adaln.hook_attn_{what}"] for what in ("shift", "scale"))
    matrices = dict(zip("qkv", dit.weights[f"{at}.attn_qkv.weight"].chunk(3), strict=True))

    def projected(letter, x):
        return rotated((x @ matrices[letter].T).unflatten(-1, (dit.heads, -1))[None])[0, :, head]

    def of_write(letter, write):
        x = (write - write.mean(-1, keepdim=True)) / values[f"{at}.ln1.hook_scale"][0]
        return projected(letter, x * dit.weights[f"{at}.norm1.weight"] * (1 + scale))

    writes = {"embed": values["hook_embed"][0]}
    for one in range(layer):
        for number in range(dit.heads):
            writes[f"L{one}H{number}"] = values[f"blocks.{one}.attn.hook_result"][0, :, number]
        writes[f"{one}_mlp_out"] = values[f"blocks.{one}.hook_mlp_out"][0]
    query, keys = (values[f"{at}.attn.hook_rot_{letter}"][0, :, head] for letter in "qk")
    for ending, chosen in (("", alone), ("_excess", excess)):
        weights = chosen * share / query.shape[-1] ** 0.5
        for side, letter in (("from_key", "k"), ("from_query", "q")):
            parts = {name: of_write(letter, write) for name, write in writes.items()}
            parts["own_bias"] = projected(letter, shift.expand_as(writes["embed"]))
            naive = {
                name: float((weights * (query @ part.T if letter == "k" else part @ keys.T)).sum())
                for name, part in parts.items()
            }
            found = table[side + ending].to_series()
            size = sum(abs(part) for part in naive.values())
            assert {name: found[name] for name in naive} == pytest.approx(naive, abs=1e-4 * size)
            assert found.sum() == pytest.approx(sum(naive.values()), abs=1e-4 * size)
            assert abs(found["rest"]) < 1e-4 * size


@torch.no_grad()
def test_readers_of_a_message_read_it_gated(pair, run):
    (_, dit), row, step, layer, head = pair, 1, 2, 0, 1
    ids, time = canvas_of(run, step, row)
    base = dit(ids, time)
    values, at = base.values, f"blocks.{layer}"
    value = values[f"{at}.attn.hook_v"][0, :, head]
    key = int(values[f"{at}.attn.hook_pattern"][0, head].sum(0).argmax())
    message = values[f"{at}.attn.hook_pattern"][0, head, :, key, None] * (value.mean(0) - value[key])
    output = dit.weights[f"{at}.attn_out.weight"].T.unflatten(0, (dit.heads, -1))[head]
    change = (message @ output * values[f"{at}.adaln.hook_attn_gate"])[None]
    normed = values["blocks.1.hook_resid_mid"] + change

    def normalized(x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    for name, edit in (
        ("1_mlp_in", {"blocks.1.ln2.hook_normalized": lambda _: normalized(normed)}),
        ("logits", {"blocks.2.hook_resid_post": lambda x: x + change}),
    ):
        after = dit(ids, time, edit).logits
        undecided = run.undecided[row, step]
        first, second = (one[0, undecided].double().log_softmax(-1) for one in (base.logits, after))
        expected = float((first.exp() * (first - second)).sum(-1).mean())
        table = read_attribution(run, step, layer, head, key, row=row, readers={"one": [name]})
        assert table["kl"].sel(reader="one").item() == pytest.approx(expected, rel=1e-3)
        assert expected > 1e-6


@torch.no_grad()
def test_the_lens_reads_with_the_final_modulation_of_the_step(pair, run):
    (model, dit), row, step = pair, 1, 2
    ids, time = canvas_of(run, step, row)
    passed = dit(ids, time)
    read = logit_lens(model, run, steps=[step], row=row, top_k=model.cfg.d_vocab)
    for layer in range(3):
        stream = passed.values[f"blocks.{layer}.hook_resid_post"]
        probs = dit.read_out(stream, passed.values["hook_cond"], lambda _, value: value).softmax(-1)[0]
        here = read.sel(step=step, layer=layer)
        found = torch.zeros_like(probs).scatter(
            1, torch.from_numpy(here["token"].to_numpy()), torch.from_numpy(here["probability"].to_numpy())
        )
        close(found, probs)
    close(found, passed.logits.softmax(-1)[0])


def test_a_lens_in_a_run_reads_with_an_edited_noise_level(pair):
    model, dit = pair
    lens = LogitLens(layers=[2], steps=[1])
    edit = ("hook_time", lambda value, hook: value * 0 + 0.6)
    run = sinklens.generate(model, [[5, 9, 13]], gen_length=6, steps=4, hooks=[edit, lens])
    probs = dit(run.canvas[:, 1], 0.6).logits.softmax(-1)[0]
    if not model.config.time_conditioning:  # an untimed network reads time 0, and the hook replaces that
        dit.timed = True
        probs = dit(run.canvas[:, 1], 0.6).logits.softmax(-1)[0]
        dit.timed = False
    read = lens.read(run)
    close(torch.from_numpy(read["probability"][0, 0, :, 0].to_numpy()), probs.amax(-1))


def test_a_tuned_lens_of_a_timed_network_agrees_better_with_its_predictions(conformance):
    model, _ = _loaded(conformance / "gidd")
    prompts, settings = [[3 + n, 9, 20 + n] for n in range(6)], {"gen_length": 8, "steps": 6}
    lens = train_tuned_lens(model, prompts, buckets=1, updates=60, batch=64, learning_rate=3e-3, **settings)
    run = sinklens.generate(model, [[11, 9, 31]], **settings)
    shared = {"top_k": model.cfg.d_vocab, "layers": [0, 2]}
    divergences = []
    for one in (None, lens):
        read = logit_lens(model, run, lens=one, **shared)
        order = np.argsort(read["token"].to_numpy(), axis=-1)
        probs = np.take_along_axis(read["probability"].to_numpy(), order, axis=-1)
        masked = read["masked"].to_numpy()
        divergences.append((probs[:, 1] * np.log(probs[:, 1] / probs[:, 0])).sum(-1)[masked].mean())
    assert divergences[1] < 0.7 * divergences[0]


@torch.no_grad()
def test_directions_of_tokens_carry_the_final_scale(pair):
    (model, dit), (ids, _) = pair, two_inputs()
    passed, token = timed(dit, ids), 17
    normalized, shift = passed.values["ln_final.hook_normalized"], passed.values["hook_final_shift"]
    rest = model.b_U[token] + shift @ model.W_U[:, token]
    directions = model.tokens_to_residual_directions(token, time=TIME)
    if model.config.time_conditioning:
        assert directions.shape == (2, model.cfg.d_model)
        with pytest.raises(SettingError, match="reads the noise level of its canvas; pass time="):
            model.tokens_to_residual_directions(token)
        with pytest.raises(SettingError, match="time= has 2 numbers, and tokens has 3 rows"):
            model.tokens_to_residual_directions(ids[:1].repeat(3, 1), time=TIME)
    else:
        close(directions[0], model.tokens_to_residual_directions(token))
    close(torch.einsum("bpd,bd->bp", normalized, directions) + rest[:, None], passed.logits[..., token])
    alone = model.tokens_to_residual_directions(token, time=0.8)
    close(alone, directions[1])
    each = model.tokens_to_residual_directions(ids, time=TIME)
    close(each[1, 3], model.tokens_to_residual_directions(int(ids[1, 3]), time=0.8))


@torch.no_grad()
def test_components_of_a_cache_are_gated_and_add_up_to_the_logits(pair):
    (model, dit), (ids, _) = pair, two_inputs()
    passed, cache = timed(dit, ids), model.run_with_cache(ids, time=TIME)[1]
    values = passed.values
    stack, labels = cache.get_full_resid_decomposition(expand_neurons=True, return_labels=True)
    close(stack.sum(0), values["blocks.2.hook_resid_post"])
    close(stack[labels.index("L1H2")], values["blocks.1.attn.hook_result"][:, :, 2])
    gate, down = values["blocks.1.adaln.hook_mlp_gate"], dit.weights["blocks.1.mlp.2.weight"]
    neuron = values["blocks.1.mlp.hook_post"][..., 5, None] * down[:, 5] * gate[:, None]
    close(stack[labels.index("L1N5")], neuron)
    close(cache.get_neuron_results(1, neuron_slice=5), neuron)
    close(cache.get_neuron_results(1, pos_slice=-1)[:, 5], neuron[:, -1])
    shift, token = values["hook_final_shift"], 17
    for parts in (stack, cache.decompose_resid()):
        found = cache.logit_attrs(parts, token).sum(0) + model.b_U[token] + (shift @ model.W_U[:, token])[:, None]
        close(found, passed.logits[..., token])
    answers = torch.tensor([3, 17])
    rest = model.b_U[answers] + torch.einsum("bd,db->b", shift, model.W_U[:, answers])
    found = cache.logit_attrs(stack, answers).sum(0) + rest[:, None]
    close(found, torch.stack([passed.logits[0, :, 3], passed.logits[1, :, 17]]))
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), 7, incorrect_tokens=9, pos_slice=-1).sum(0)
    difference = model.b_U[7] - model.b_U[9] + shift @ (model.W_U[:, 7] - model.W_U[:, 9])
    close(last + difference, passed.logits[:, -1, 7] - passed.logits[:, -1, 9])


@torch.no_grad()
def test_slices_norms_and_projections_of_a_gated_cache_agree(pair):
    (model, _), (ids, _) = pair, two_inputs()
    points = lambda name: not name.endswith("hook_result")  # noqa: E731  to be made from hook_z
    cache = model.run_with_cache(ids, time=TIME, names_filter=points)[1]
    direction = torch.randn(model.cfg.d_model)
    for expand in (True, False):
        stack = cache.get_full_resid_decomposition(2, expand_neurons=expand, apply_ln=True)
        scale = cache["blocks.2.ln1.hook_scale"]
        stream = cache["resid_post", 1]
        close(stack.sum(0), (stream - stream.mean(-1, keepdim=True)) / scale)
        projected = cache.get_full_resid_decomposition(
            2, expand_neurons=expand, apply_ln=True, project_output_onto=direction
        )
        close(projected, stack @ direction)
    row = cache.apply_slice_to_batch_dim(1)
    close(row.get_full_resid_decomposition(2), cache.get_full_resid_decomposition(2)[:, 1])
    whole = cache.decompose_resid()
    close(row.logit_attrs(whole[:, 1], 5, has_batch_dim=False), cache.logit_attrs(whole, 5)[:, 1])
    close(cache.logit_attrs(whole, 5, batch_slice=1), cache.logit_attrs(whole, 5)[:, 1])
    with pytest.raises(SettingError, match=r"use sinklens\.experiments\.logit_lens on a run"):
        cache.logit_lens()


@torch.no_grad()
def test_an_undone_jump_is_that_of_a_plain_pass(pair, run):
    """The lead of the new key if the head's queries read what the embedding wrote one step before."""
    (_, dit), row, step, layer, head = pair, 1, 2, 1, 0
    jump = Jump(2.0, step, layer, head, 2, 5, row)
    before, time_before = canvas_of(run, step - 1, row)
    now, time = canvas_of(run, step, row)
    at = f"blocks.{layer}.attn.hook_q"

    def lead(edits=None):
        column = dit(now, time, edits).values[f"blocks.{layer}.attn.hook_pattern"][0, head].sum(0)
        return float(column[5] - column[2])

    base, source = dit(now, time).values, dit(before, time_before).values
    stream = base[f"blocks.{layer}.hook_resid_pre"] + source["hook_embed"] - base["hook_embed"]
    moved = dit(now, time, {f"blocks.{layer}.hook_resid_pre": lambda _: stream}).values[at]

    def queries(value):
        value = value.clone()
        value[:, :, head] = moved[:, :, head]
        return value

    expected = (lead() - lead({at: queries})) / jump.size
    assert jump_undone(run, jump, "embed", "q") == pytest.approx(expected, abs=1e-4)
