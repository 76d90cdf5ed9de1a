"""Ways from scores to attention weights: each is its formula, at every point, however it is watched."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from building import left_padding, plain_pass, random_hf, random_ids, random_model

import sinklens
from sinklens.hooks import attention
from sinklens.hooks.normalizers import NORMALIZERS
from sinklens.interventions import MaskSinks
from sinklens.sinks import Detector

AT = "blocks.1.attn"
OTHERS = ["sigmoid", "off-by-one"]
PADDINGS = [pytest.param(None, id="whole"), pytest.param(left_padding(), id="padded")]


def other(way, causal=False, **settings):
    return random_model("llama", causal, sinklens_attention=way, **settings)


def hide_key_2(mask):
    mask[..., 2] = -torch.inf
    return mask


def passed(model, ids, real=None, edit=None, points=("hook_attn_scores", "hook_pattern", "hook_sink_scores", "hook_z")):
    """The logits and what the points of layer 1 show, with `edit` on its mask."""
    seen = {}
    hooks = [] if edit is None else [(f"{AT}.hook_attn_mask", lambda value, hook: edit(value))]
    hooks += [(f"{AT}.{point}", lambda value, hook: seen.update({hook.name: value.detach()})) for point in points]
    return model.run_with_hooks(ids, attention_mask=real, fwd_hooks=hooks), seen


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("softmax", [math.e / (math.e + 1), 1 / (math.e + 1), 0.0]),
        ("sigmoid", [math.e / (math.e + 3), 1 / (1 + 3), 0.0]),
        ("off-by-one", [math.e / (math.e + 2), 1 / (math.e + 2), 0.0]),
    ],
)
def test_weights_of_three_scores_are_those_written_out(way, expected):
    scores = torch.tensor([[[[1.0, 0.0, -math.inf]]]])
    found = NORMALIZERS[way](scores, torch.tensor([[[[3]]]]))
    torch.testing.assert_close(found, torch.tensor([[[expected]]]))


@pytest.mark.parametrize("way", NORMALIZERS)
def test_a_query_that_sees_nothing_weighs_nothing_and_keeps_its_gradient_finite(way):
    scores = torch.full((1, 1, 2, 3), -torch.inf)
    scores[0, 0, 1] = 0.5
    scores.requires_grad_()
    weights = NORMALIZERS[way](scores, torch.tensor([0, 3])[None, None, :, None])
    weights.square().sum().backward()
    assert (weights[0, 0, 0] == 0).all()
    assert scores.grad[0, 0, 1].isfinite().all()
    assert not scores.grad.isnan().any()


@pytest.mark.parametrize("edit", [None, hide_key_2])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", OTHERS)
def test_every_point_shows_the_formula(way, causal, real, edit):
    model, ids = other(way, causal), random_ids()
    edits = None if edit is None else {f"{AT}.hook_attn_mask": lambda value: edit(value.clone())}
    plain = plain_pass(model, ids, real, edits)
    logits, seen = passed(model, ids, real, edit)
    counted = slice(None) if real is None else real
    torch.testing.assert_close(logits[counted], plain.logits[counted], atol=1e-4, rtol=0)
    for name, value in seen.items():
        torch.testing.assert_close(value, plain.values[name].expand_as(value), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("points", [(), ("hook_sink_scores",), ("hook_pattern",), ("hook_attn_mask", "hook_z")])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("way", OTHERS)
def test_watching_leaves_the_logits_bit_for_bit(way, real, points):
    model, ids = other(way), random_ids()
    assert torch.equal(passed(model, ids, real, points=points)[0], model(ids, attention_mask=real))


@pytest.mark.parametrize("way", OTHERS)
def test_a_transformers_model_without_points_attends_alike(way):
    hf, ids = random_hf(sinklens_attention=way), random_ids()
    hf.set_attn_implementation(attention.NAME)
    for layer in hf.model.layers:
        layer.self_attn.is_causal = False
    torch.testing.assert_close(hf(ids).logits, other(way)(ids))


def test_a_key_that_is_hidden_leaves_the_others_their_weight_under_sigmoid_alone():
    ids, before, after = random_ids(), {}, {}
    for way in NORMALIZERS:
        model = other(way)
        before[way] = passed(model, ids)[1][f"{AT}.hook_pattern"]
        after[way] = passed(model, ids, edit=hide_key_2)[1][f"{AT}.hook_pattern"]
        assert (after[way][..., 2] == 0).all()
    kept = torch.arange(7) != 2
    assert torch.equal(before["sigmoid"][..., kept], after["sigmoid"][..., kept])
    for way in ("softmax", "off-by-one"):
        assert (after[way][..., kept] > before[way][..., kept]).all()


@pytest.mark.parametrize("way", OTHERS)
def test_a_row_that_was_padded_in_a_batch_generates_as_alone(way):
    model = other(way)
    long, short = [3, 9, 4, 22, 17, 8], [5, 31, 12]
    settings = {"gen_length": 8, "steps": 4, "block_length": 8}
    both = sinklens.generate(model, [long, short], **settings)
    alone = sinklens.generate(model, [short], **settings)
    assert both.tokens[1, 3:].tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize("way", OTHERS)
def test_in_a_trace_block_sums_may_be_read_before_the_pattern_they_are_sums_of(way):
    model = other(way)
    with sinklens.trace(model, [3, 9, 4, 22], gen_length=4, steps=2, block_length=4) as t:
        sums, patterns = [], []
        for _ in t.steps:
            sums.append(t[f"{AT}.hook_sink_scores"])
            patterns.append(t[f"{AT}.hook_pattern"])
    assert len(sums) == 2
    for summed, pattern in zip(sums, patterns, strict=True):
        torch.testing.assert_close(summed, pattern.sum(dim=2))


def test_a_model_and_its_tracks_say_how_they_weigh():
    for way in NORMALIZERS:
        model = other(way)
        assert ("attention=" in repr(model)) == (way != "softmax")
        assert repr(model).count(repr(way)) == (way != "softmax")
        run = sinklens.generate(model, [[3, 9, 4]], gen_length=2, steps=1, block_length=2)
        assert run.sinks.data.attrs["attention"] == way


@dataclass(frozen=True)
class Seen(Detector):
    """Finds nothing, and keeps what it was shown."""

    shown: list = field(default_factory=list)

    def detect(self, track):
        self.shown.append(torch.from_numpy(track.scores().to_numpy()))
        return track.scores() > 1e9


@pytest.mark.parametrize("way", NORMALIZERS)
def test_masking_judges_an_autoregressive_run_by_what_the_newest_query_weighs(way):
    model, detector, newest = other(way, causal=True), Seen(), []
    keep = (f"{AT}.hook_pattern", lambda value, hook: newest.append(value[0, :, -1].clone()))
    with sinklens.trace(model, [3, 9, 4, 22], gen_length=4, hooks=[MaskSinks(top_k=None, detector=detector), keep]):
        pass
    assert len(newest) == 4
    assert len(detector.shown) >= 3
    for shown, row in zip(detector.shown, newest, strict=False):
        keys = row.shape[-1]
        torch.testing.assert_close(shown[0, 0, 1, :, :keys].float(), row * keys)
