"""MDLM, BD3-LM, SEDD, Duo and GIDD: one pass equals the authors' in logits, patterns, stream and modulation."""

import pytest
import torch
from dit_oracle import PlainDit
from safetensors.torch import load_file
from stored.folders import largest_difference
from stored.runs import open_folder, stored_pass

from sinklens.errors import HookNameError, SettingError

MODULATION = [f"hook_{part}_{what}" for part in ("attn", "mlp") for what in ("shift", "scale", "gate")]
TOLERANCE = 1e-4


@pytest.fixture(params=["mdlm", "bd3lm-owt", "duo", "sedd", "gidd"])
def reference(request, conformance):
    return open_folder(conformance / request.param)


@pytest.fixture
def model(reference):
    return reference.load()


@pytest.fixture
def ids(reference):
    return reference.tensors["input_ids"].long()


def close(found, expected):
    assert largest_difference(found, expected) < TOLERANCE


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("number", [0, 1])
def test_a_pass_has_the_references_stream_and_modulation(reference, model, ids, number):
    prefix = f"pass{number}."
    expected = {name.removeprefix(prefix): v for name, v in reference.tensors.items() if name.startswith(prefix)}
    time = next(expected[name] for name in ("sigma_used", "sigma", "t") if name in expected)
    with torch.no_grad():
        logits, points = model.run_with_cache(ids, time=time)
    close(logits, expected["logits"])
    close(points["hook_cond"], expected["cond"])
    if "pattern" not in expected:
        return
    close(points["hook_embed"], expected["resid"][0])
    close(torch.cat([points["hook_final_shift"], points["hook_final_scale"]], dim=-1), expected["final_modulation"])
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        close(points[f"{block}.attn.hook_pattern"], expected["pattern"][:, layer])
        close(points[f"{block}.hook_resid_post"], expected["resid"][layer + 1])
        close(torch.cat([points[f"{block}.adaln.{name}"] for name in MODULATION], -1), expected["modulation"][layer])


def test_every_point_equals_plain_torch(reference, model, ids):
    time = stored_pass(reference).time
    with torch.no_grad():
        _, points = model.run_with_cache(ids, time=time)
        mask = None
        if model.block_length is not None:
            block = torch.arange(ids.shape[1]) // model.block_length
            mask = torch.where(block[None] <= block[:, None], 0.0, -torch.inf)
        plain = PlainDit(reference.path)(ids, time, mask=mask).values
    for name, value in plain.items():
        close(points[name].nan_to_num(neginf=0.0), value.nan_to_num(neginf=0.0))
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        for norm, part in (("ln1", "attn"), ("ln2", "mlp")):
            shift, scale, gate = (
                plain[f"{block}.adaln.hook_{part}_{what}"][:, None] for what in ("shift", "scale", "gate")
            )
            close(points[f"{block}.hook_{part}_ungated"] * gate, plain[f"{block}.hook_{part}_out"])
            read = plain[f"{block}.{norm}.hook_normalized"] * getattr(model.blocks[layer], norm).w * (1 + scale) + shift
            close(points[f"{block}.{norm}.hook_modulated"], read)


def test_an_edited_head_result_changes_the_stream_by_the_edit(reference, model, ids):
    time, at = stored_pass(reference).time, "blocks.0.attn.hook_result"
    _, before = model.run_with_cache(ids, time=time)
    head = torch.arange(model.cfg.n_heads)[:, None]
    with model.hooks(fwd_hooks=[(at, lambda value, hook: value * (head != 0))]):
        _, after = model.run_with_cache(ids, time=time, names_filter="blocks.0.hook_attn_out")
    close(after["blocks.0.hook_attn_out"], before["blocks.0.hook_attn_out"] - before[at][:, :, 0])


def test_each_row_has_its_time_which_hooks_read_and_edit_and_an_untimed_network_ignores(model, ids):
    timed, seen, times = model.config.time_conditioning, [], torch.tensor([0.2, 0.8])
    keep = ("blocks.0.hook_resid_pre", lambda value, hook: seen.append(hook.forward_pass.time))
    both = model.run_with_hooks(ids, time=times, fwd_hooks=[keep])
    assert torch.equal(seen[0], times if timed else torch.zeros(2))
    close(both, torch.cat([model(ids[:1], time=0.2), model(ids[1:], time=0.8)]))
    other = model(ids, time=0.3)
    assert torch.equal(other, both) is not timed
    if timed:
        edited = model.run_with_hooks(ids, time=0.9, fwd_hooks=[("hook_time", lambda value, hook: value * 0 + 0.3)])
        assert largest_difference(edited, other) < 1e-6
        assert largest_difference(model(ids, time=0.9), other) > 1e-2


def test_a_timed_network_needs_its_time_and_others_refuse_it(conformance, tiny_llada):
    ids = torch.full((2, 4), 5)
    timed, untimed = (open_folder(conformance / name).load() for name in ("sedd", "mdlm"))
    assert torch.equal(untimed(ids), untimed(ids, time=3.0))
    for model, given, message in (
        (timed, {}, "reads the noise level of its canvas; pass time="),
        (timed, {"time": torch.rand(3)}, "time= has 3 numbers, but the batch has 2 rows; pass one, or 2"),
        (timed, {"time": float("nan")}, "must be finite numbers of at least 0"),
        (tiny_llada, {"time": 0.5}, "not conditioned on the noise level; leave time= out"),
    ):
        with pytest.raises(SettingError, match=message):
            model(ids, **given)


def test_every_head_reads_its_own_copy_of_the_stream(reference, model, ids):
    time, hooks = stored_pass(reference).time, [("blocks.0.attn.hook_q_input", lambda value, hook: value)]
    plain = model(ids, time=time)
    model.set_use_split_qkv_input(True)
    try:
        close(model.run_with_hooks(ids, time=time, fwd_hooks=hooks), plain)
    finally:
        model.set_use_split_qkv_input(False)


def test_weights_have_transformer_lens_names_and_no_gate_branch(reference, model):
    raw = load_file(reference.path / "model.safetensors")
    prefix = "" if "blocks.0.attn_qkv.weight" in raw else "backbone."
    for matrix, found in zip(
        raw[f"{prefix}blocks.0.attn_qkv.weight"].chunk(3), (model.W_Q, model.W_K, model.W_V), strict=True
    ):
        assert torch.equal(found[0].transpose(-2, -1).flatten(0, 1), matrix)
    assert torch.equal(model.W_in[0].T, raw[f"{prefix}blocks.0.mlp.0.weight"])
    assert (model.cfg.normalization_type, model.cfg.gated_mlp, model.cfg.final_rms) == ("LN", False, False)
    with pytest.raises(SettingError, match="the MLP of this model has no gate"):
        _ = model.W_gate
    with pytest.raises(HookNameError, match=r"blocks.0.mlp has no hook_pre_linear in this model"):
        model.run_with_cache(torch.zeros(1, 4, dtype=torch.long), names_filter="blocks.0.mlp.hook_pre_linear", time=0.1)


def test_decompositions_without_gates_are_refused_and_the_parts_of_the_stream_are_not(model, ids):
    _, cache = model.run_with_cache(ids, time=0.3 if model.tree.timed else None)
    close(cache.decompose_resid().sum(0), cache["resid_post", -1])
    calls = [cache.logit_lens, cache.compute_head_results, lambda: model.tokens_to_residual_directions(3)]
    for call in [*calls, lambda: cache.logit_attrs(cache.decompose_resid(), 3), lambda: cache.get_neuron_results(0)]:
        with pytest.raises(SettingError, match=r"leave out the gates, scales and shifts"):
            call()
