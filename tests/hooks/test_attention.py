"""Watching selects how attention is computed, but does not change the result."""

import pytest
import torch
from building import KINDS, PADDINGS, left_padding, plain_pass, random_hf, random_ids, random_model, shared_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from sinklens.errors import ReadOnlyHookError
from sinklens.hooks.attention import attention as module
from sinklens.hooks.attention import column_sums

AT = "blocks.1.attn"


def watch(model, ids, *points, real=None, edits=None):
    """The logits and the values of `points` of layer 1 in one pass, with `edits` at other points of that layer."""
    seen = {}

    def keep(value, hook):
        seen[hook.name.removeprefix(f"{AT}.")] = value.detach().clone()

    hooks = [
        *((f"{AT}.{point}", lambda value, hook, edit=edit: edit(value)) for point, edit in (edits or {}).items()),
        *((f"{AT}.{point}", keep) for point in points),
    ]
    return model.run_with_hooks(ids, attention_mask=real, fwd_hooks=hooks), *(seen[point] for point in points)


@pytest.fixture
def no_explicit_map(monkeypatch):
    """Makes forming the map an error in this test; loading a model forms it once, so all models are loaded before."""
    for kind in KINDS:
        shared_model(*kind)

    def refuse(*args, **kwargs):
        raise AssertionError("the map was made explicit")

    monkeypatch.setattr(module, "_explicit", refuse)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_unwatched_logits_are_those_of_transformers_bit_for_bit(architecture, causal, real):
    hf, ids = random_hf(architecture, causal), random_ids()
    hf.set_attn_implementation("sdpa")
    for part in hf.modules():
        if hasattr(part, "is_causal"):
            part.is_causal = causal
    positions = None if real is None else (real.long().cumsum(1) - 1).clamp(min=0)
    expected = hf(ids, attention_mask=real, position_ids=positions, use_cache=False).logits
    assert torch.equal(shared_model(architecture, causal)(ids, attention_mask=real), expected)


def test_a_model_without_points_computes_the_attention_of_transformers():
    hf, ids = random_hf(causal=True), random_ids()
    expected = hf(ids).logits
    hf.set_attn_implementation(module.NAME)
    assert torch.equal(hf(ids).logits, expected)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
@pytest.mark.parametrize("points", [["hook_sink_scores"], ["hook_attn_mask"], ["hook_rot_q", "hook_rot_k", "hook_z"]])
@pytest.mark.usefixtures("no_explicit_map")
def test_watching_anything_except_the_map_does_not_change_the_logits_in_any_bit(model, ids, real, points):
    assert torch.equal(watch(model, ids, *points, real=real)[0], model(ids, attention_mask=real))


# The last length is odd and longer than a block of the fused kernel and a block of the sums.
@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(
    ("architecture", "causal", "length"),
    [(*kind, length) for kind in KINDS for length in (2, 7)] + [("llama", False, 63), ("llama", True, 63)],
)
@pytest.mark.parametrize("real", [False, True])
def test_sink_scores_are_the_column_sums_of_the_pattern(architecture, causal, real, length):
    model, ids = shared_model(architecture, causal), random_ids(length=length)
    real = left_padding(length=length, padded=length // 2) if real else None
    fused = watch(model, ids, "hook_sink_scores", real=real)[1]
    explicit, pattern = watch(model, ids, "hook_sink_scores", "hook_pattern", real=real)[1:]
    plain = plain_pass(model, ids, real).values
    for scores in (fused, explicit):
        torch.testing.assert_close(scores.double(), pattern.double().sum(2), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(scores, plain[f"{AT}.hook_sink_scores"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_in_bfloat16_sink_scores_agree_with_the_pattern_to_its_rounding(causal):
    """A weight of at most 1 is rounded to 2⁻⁹; sums of seven, and those of the fused kernel, stay within 0.03."""
    model, ids = random_model("llama", causal, dtype=torch.bfloat16), random_ids()
    logits, fused = watch(model, ids, "hook_sink_scores", real=left_padding())
    pattern = watch(model, ids, "hook_pattern", real=left_padding())[1]
    assert torch.equal(logits, model(ids, attention_mask=left_padding()))
    assert fused.dtype == torch.float32
    assert pattern.dtype == torch.bfloat16
    torch.testing.assert_close(fused, pattern.float().sum(2), atol=0.03, rtol=0)
    torch.testing.assert_close(fused.sum(-1), torch.tensor([[4.0], [7.0]]).expand(2, 6), atol=0.03, rtol=0)


@pytest.mark.parametrize("points", [["hook_sink_scores"], ["hook_sink_scores", "hook_pattern"]])
@pytest.mark.parametrize("padded", [0, 3])
def test_a_cached_step_scores_its_query_against_all_keys(points, padded):
    model, ids, real = shared_model("llama", causal=True), random_ids(), left_padding(padded=padded)
    plain = plain_pass(model, ids, real)
    past, seen = DynamicCache(), {}
    model.tree.hidden(ids[:, :-1], real[:, :-1], past)
    hooks = [(f"{AT}.{point}", lambda value, hook: seen.update({hook.name: value})) for point in points]
    with model.tree.hooks(fwd_hooks=hooks):
        hidden = model.tree.hidden(ids[:, -1:], real, past)
    torch.testing.assert_close(model.tree.head(hidden)[:, 0], plain.logits[:, -1], atol=1e-4, rtol=0)
    last_row = plain.values[f"{AT}.hook_pattern"][:, :, -1]
    torch.testing.assert_close(seen[f"{AT}.hook_sink_scores"], last_row, atol=1e-5, rtol=0)


def hide_key_2(mask):
    mask[..., 2] = -torch.inf
    return mask


def hide_key_2_in_head_1(mask):
    mask[:, 1, :, 2] = -torch.inf
    return mask


def favour_by_row(mask):
    """A full [query, key] bias: nonzero values, and query 5 does not see key 4."""
    rows, keys = torch.arange(7)[:, None], torch.arange(7)
    bias = (rows * 1.3 + keys * 0.7).sin()
    bias[5, 4] = -torch.inf
    return mask + bias


MASKS = [hide_key_2, hide_key_2_in_head_1, favour_by_row]


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
@pytest.mark.parametrize("edit", MASKS)
def test_an_edited_mask_has_the_same_effect_in_fused_and_explicit_attention(model, ids, real, edit):
    fused, fused_sinks = watch(model, ids, "hook_sink_scores", real=real, edits={"hook_attn_mask": edit})
    only = watch(model, ids, real=real, edits={"hook_attn_mask": edit})[0]
    explicit, pattern, sinks = watch(
        model, ids, "hook_pattern", "hook_sink_scores", real=real, edits={"hook_attn_mask": edit}
    )
    plain = plain_pass(model, ids, real, {f"{AT}.hook_attn_mask": lambda value: edit(value.clone())})
    assert torch.equal(only, fused)
    counted = slice(None) if real is None else real
    for logits in (fused, explicit):
        torch.testing.assert_close(logits[counted], plain.logits[counted], atol=1e-4, rtol=0)
    torch.testing.assert_close(pattern, plain.values[f"{AT}.hook_pattern"], atol=1e-5, rtol=0)
    for scores in (fused_sinks, sinks):
        torch.testing.assert_close(scores, plain.values[f"{AT}.hook_sink_scores"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("edit", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("no_explicit_map")
def test_editing_the_mask_does_not_make_the_map_explicit(model, ids, edit, real):
    edited = watch(model, ids, "hook_sink_scores", real=real, edits={"hook_attn_mask": edit})[0]
    assert not torch.equal(edited, model(ids, attention_mask=real))


class Largest(TorchDispatchMode):
    """Records the largest storage, in elements, of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("edit", [pytest.param(hide_key_2, marks=pytest.mark.extended), hide_key_2_in_head_1])
@pytest.mark.parametrize("points", [[], ["hook_sink_scores"]])
def test_a_bidirectional_model_does_not_form_a_query_by_key_mask_for_every_head(monkeypatch, edit, points):
    length = 256
    monkeypatch.setitem(column_sums.BLOCK_ELEMENTS, "cpu", length)
    model = random_model(max_position_embeddings=length)
    ids, real = random_ids(length=length), left_padding(length=length, padded=100)
    with torch.no_grad(), Largest() as largest:
        watch(model, ids, *points, real=real, edits={"hook_attn_mask": edit})
    assert largest.elements <= len(ids) * length**2, "PyTorch forms one query-by-key padding mask for all heads"


def test_a_float32_mask_is_accepted_by_a_bfloat16_model():
    model, ids = random_model(dtype=torch.bfloat16), random_ids()
    as_float = {"hook_attn_mask": lambda mask: hide_key_2(mask.float())}
    as_given = {"hook_attn_mask": hide_key_2}
    assert torch.equal(watch(model, ids, edits=as_float)[0], watch(model, ids, edits=as_given)[0])
    expected = watch(model, ids, "hook_sink_scores", edits=as_given)[1]
    assert torch.equal(watch(model, ids, "hook_sink_scores", edits=as_float)[1], expected)


def blind_query_4(mask):
    mask = mask.expand(-1, -1, 7, -1).clone()
    mask[:, :, 4] = -torch.inf
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("points", [["hook_sink_scores"], ["hook_sink_scores", "hook_pattern"]])
def test_a_fully_masked_query_has_zero_output_and_adds_nothing_to_the_sums(model, ids, points):
    z, sinks = watch(model, ids, "hook_z", *points, edits={"hook_attn_mask": blind_query_4})[1:3]
    assert (z[:, 4] == 0).all()
    torch.testing.assert_close(sinks.sum(-1), torch.full((2, 6), 6.0))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("point", ["hook_sink_scores", "hook_pattern", "hook_attn_scores"])
@pytest.mark.parametrize(
    ("causal", "real", "edits"),
    [(True, left_padding(), {}), (False, None, {"hook_attn_mask": blind_query_4})],
    ids=["padding", "mask"],
)
def test_gradients_with_a_fully_masked_query_are_those_of_fused_attention(ids, causal, real, edits, point):
    """softmax without any key is 0/0: its gradient would be NaN and propagate to all earlier weights."""

    def gradient(*points):
        model = random_model("llama", causal)
        watch(model, ids, *points, real=real, edits=edits)[0][:, 5:].sin().sum().backward()
        return model.tree.hf.model.embed_tokens.weight.grad

    torch.testing.assert_close(gradient(point), gradient(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("points", [[], ["hook_pattern"]], ids=["fused", "explicit"])
@pytest.mark.parametrize(
    "write",
    [
        lambda value: value * 2,
        lambda value: value.clone(),
        lambda value: value.zero_(),
        lambda value: (value[:, 0].fill_(1), value)[1],
    ],
    ids=["new", "copy", "in place", "view in place"],
)
def test_writing_to_sink_scores_is_refused(model, ids, points, write):
    message = rf"{AT}\.hook_sink_scores only reports .* edit hook_attn_mask .* or hook_pattern of the same layer"
    before = model(ids)
    with pytest.raises(ReadOnlyHookError, match=message):
        watch(model, ids, *points, edits={"hook_sink_scores": write})
    assert torch.equal(model(ids), before)


def test_sink_scores_can_be_watched_in_inference_mode(model, ids):
    expected = watch(model, ids, "hook_sink_scores")[1]
    with torch.inference_mode():
        assert torch.equal(watch(model, ids, "hook_sink_scores")[1], expected)
        with pytest.raises(ReadOnlyHookError, match="only reports what attention did"):
            watch(model, ids, edits={"hook_sink_scores": lambda value: value * 2})
