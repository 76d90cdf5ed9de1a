"""Each normalizer gives the weights of its formula, at every point, however the point is watched."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from building import PADDINGS, plain_pass, random_hf, random_ids, random_model

import sinklens
from sinklens.hooks.attention import attention
from sinklens.hooks.attention.normalizers import NORMALIZERS
from sinklens.interventions import MaskSinks
from sinklens.sinks import Detector

AT = "blocks.1.attn"
OTHERS = ["sigmoid", "off-by-one"]


def other(normalizer, causal=False, **settings):
    return random_model("llama", causal, sinklens_attention=normalizer, **settings)


def passed(model, ids, real=None, edit=None, points=("hook_attn_scores", "hook_pattern", "hook_sink_scores", "hook_z")):
    """The logits and the values at the points of layer 1, with `edit` applied to its mask."""
    seen = {}
    hooks = [] if edit is None else [(f"{AT}.hook_attn_mask", lambda value, hook: edit(value))]
    hooks += [(f"{AT}.{point}", lambda value, hook: seen.update({hook.name: value.detach()})) for point in points]
    return model.run_with_hooks(ids, attention_mask=real, fwd_hooks=hooks), seen


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        ("softmax", [math.e / (math.e + 1), 1 / (math.e + 1), 0.0]),
        ("sigmoid", [math.e / (math.e + 3), 1 / (1 + 3), 0.0]),
        ("off-by-one", [math.e / (math.e + 2), 1 / (math.e + 2), 0.0]),
    ],
)
def test_weights_of_three_scores_equal_the_formula(normalizer, expected):
    found = NORMALIZERS[normalizer](torch.tensor([[[[1.0, 0.0, -math.inf]]]]), torch.tensor([[[[3]]]]))
    torch.testing.assert_close(found, torch.tensor([[[expected]]]))


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_fully_masked_query_has_an_all_zero_row_and_finite_gradients(normalizer):
    scores = torch.full((1, 1, 2, 3), -torch.inf)
    scores[0, 0, 1] = 0.5
    scores.requires_grad_()
    weights = NORMALIZERS[normalizer](scores, torch.tensor([0, 3])[None, None, :, None])
    weights.square().sum().backward()
    assert (weights[0, 0, 0] == 0).all()
    assert scores.grad[0, 0, 1].isfinite().all()
    assert not scores.grad.isnan().any()


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("edit", [None, lambda mask: mask.masked_fill(torch.arange(7) == 2, -torch.inf)])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalizer", OTHERS)
def test_every_point_has_the_values_of_the_formula(normalizer, causal, real, edit):
    model, ids = other(normalizer, causal), random_ids()
    edits = None if edit is None else {f"{AT}.hook_attn_mask": lambda value: edit(value.clone())}
    plain = plain_pass(model, ids, real, edits)
    logits, seen = passed(model, ids, real, edit)
    counted = slice(None) if real is None else real
    torch.testing.assert_close(logits[counted], plain.logits[counted], atol=1e-4, rtol=0)
    for name, value in seen.items():
        torch.testing.assert_close(value, plain.values[name].expand_as(value), atol=1e-5, rtol=1e-5)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("points", [(), ("hook_sink_scores",), ("hook_pattern",), ("hook_attn_mask", "hook_z")])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("normalizer", OTHERS)
def test_watching_does_not_change_the_logits_in_any_bit(normalizer, real, points):
    model, ids = other(normalizer), random_ids()
    assert torch.equal(passed(model, ids, real, points=points)[0], model(ids, attention_mask=real))


@pytest.mark.parametrize("normalizer", OTHERS)
def test_a_transformers_model_without_points_computes_the_same_attention(normalizer):
    hf, ids = random_hf(sinklens_attention=normalizer), random_ids()
    hf.set_attn_implementation(attention.NAME)
    for layer in hf.model.layers:
        layer.self_attn.is_causal = False
    torch.testing.assert_close(hf(ids).logits, other(normalizer)(ids))


def test_a_model_and_its_sink_tracks_name_the_normalizer():
    for normalizer in NORMALIZERS:
        model = other(normalizer)
        assert ("attention=" in repr(model)) == (normalizer != "softmax")
        assert repr(model).count(repr(normalizer)) == (normalizer != "softmax")
        run = sinklens.generate(model, [[3, 9, 4]], gen_length=2, steps=1, block_length=2)
        assert run.sinks.data.attrs["attention"] == normalizer


@dataclass(frozen=True)
class Seen(Detector):
    """Finds nothing, and stores the scores it was given."""

    shown: list = field(default_factory=list)

    def detect(self, track):
        self.shown.append(torch.from_numpy(track.scores().to_numpy()))
        return track.scores() > 1e9


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_masking_of_an_autoregressive_run_uses_the_weights_of_the_newest_query(normalizer):
    model, detector, newest = other(normalizer, causal=True), Seen(), []
    keep = (f"{AT}.hook_pattern", lambda value, hook: newest.append(value[0, :, -1].clone()))
    with sinklens.trace(model, [3, 9, 4, 22], gen_length=4, hooks=[MaskSinks(top_k=None, detector=detector), keep]):
        pass
    assert len(newest) == 4
    assert len(detector.shown) >= 3
    for shown, row in zip(detector.shown, newest, strict=False):
        keys = row.shape[-1]
        torch.testing.assert_close(shown[0, 0, 1, :, :keys].float(), row * keys)
