"""Estimated effects against slopes in plain torch, real patching against plain torch, and their agreement."""

import re

import numpy as np
import pytest
import torch
import xarray as xr
from building import left_padding, plain_pass, random_hf, random_ids, random_model, shared_model
from layouts import write_family

import sinklens
from sinklens.errors import HookNameError, PromptError, SettingError
from sinklens.experiments.attribution import Agreement, agreement, attribution_patching, patching_effects
from sinklens.experiments.step_ids import of_step
from sinklens.hooks import names, table
from sinklens.tasks.word_problems import held_out

LENGTH = 6
AXES = {name.removeprefix("blocks.{l}."): spec.axes.split() for name, spec in table(names.EVERY)}
NO_VALUES = ("attn.hook_attn_mask", "attn.hook_sink_scores", "attn.hook_fresh")
KINDS = [name.removeprefix("blocks.{l}.") for name, _ in table() if not name.startswith("denoise.")]
KINDS = [name for name in KINDS if name not in NO_VALUES]
MODELS = pytest.mark.parametrize(
    ("architecture", "causal", "real"),
    [("llama", False, left_padding(2, LENGTH, 2)), ("qwen3", True, None)],
    ids=["llama, padded", "qwen3, causal"],
)


def every_value(name):
    return not name.startswith("denoise.") and not name.endswith(NO_VALUES)


def pair():
    """Two rows of ids, and the same with two tokens changed."""
    clean = random_ids(2, LENGTH)
    corrupted = clean.clone()
    corrupted[0, 1], corrupted[1, 4] = (clean[0, 1] + 7) % 60, (clean[1, 4] + 11) % 60
    return clean, corrupted


def bent(logits):
    """A nonlinear metric."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weights * logits.log_softmax(dim=-1)).sum() / 50


def at_real(real):
    """`bent` of the logits of real positions; at padding they are meaningless."""
    return bent if real is None else lambda logits: bent(torch.where(real[..., None], logits, 0.0))


def cells(kind, seed, count=3):
    """Random places of a kind of point: layer and indices along the axes of an effect."""
    sizes = {"head": 6, "kv_head": 2, "pos": LENGTH, "query": LENGTH, "key": LENGTH}
    axes = [axis for axis in AXES[kind] if axis in sizes]
    rng = np.random.default_rng([seed, len(kind)])
    for _ in range(count):
        layer = int(rng.integers(3)) if kind.split(".")[0] not in ("hook_embed", "ln_final") else None
        yield layer, {axis: int(rng.integers(sizes[axis])) for axis in axes}


def at_cell(kind, shape, place):
    """True at one place of a value, in all rows and features."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[tuple(place.get(axis, slice(None)) for axis in AXES[kind])] = True
    return mask


def metric_of(model, ids, real, name=None, edit=None):
    return at_real(real)(plain_pass(model, ids, real, {} if name is None else {name: edit}).logits).item()


@pytest.mark.fast_cases(1)
@MODELS
def test_estimates_are_slopes_towards_the_clean_value_at_every_point(architecture, causal, real):
    """Central differences of a pass in plain torch: (m(v + hΔ) − m(v − hΔ)) / 2h, Δ the change at one place."""
    model, (clean, corrupted) = random_double(architecture, causal), pair()
    found = attribution_patching(model, clean, corrupted, at_real(real), every_value, real)
    values = [plain_pass(model, ids, real).values for ids in (clean, corrupted)]
    compared = []
    for kind in KINDS:
        for layer, place in cells(kind, seed=1):
            name = kind if layer is None else f"blocks.{layer}.{kind}"
            change = (values[0][name] - values[1][name]).nan_to_num(0.0)
            step = 1e-4 * at_cell(kind, change.shape, place) * change
            slope = metric_of(model, corrupted, real, name, lambda value, step=step: value + step)
            slope = (slope - metric_of(model, corrupted, real, name, lambda value, step=step: value - step)) / 2e-4
            shown = found[kind].sel(place if layer is None else {"layer": layer, **place}).item()
            assert shown == pytest.approx(slope, rel=1e-3, abs=1e-6), (name, place)
            compared.append(abs(slope))
    assert len(compared) == 3 * len(KINDS)
    assert sum(slope > 1e-4 for slope in compared) > 0.3 * len(compared)


def random_double(architecture, causal):
    return sinklens.load(random_hf(architecture, causal, dtype=torch.float64))


@pytest.mark.fast_cases(1)
@MODELS
def test_real_patching_is_a_pass_with_one_value_replaced(architecture, causal, real):
    model, (clean, corrupted) = shared_model(architecture, causal), pair()
    names = [name for name in model.hook_names() if every_value(name)][:30]
    found = patching_effects(model, clean, corrupted, at_real(real), names, real, at_once=29)
    values, base = plain_pass(model, clean, real).values, metric_of(model, corrupted, real)
    assert found.clean == pytest.approx(metric_of(model, clean, real), abs=1e-3)
    assert found.corrupted == pytest.approx(base, abs=1e-3)
    large = 0
    for kind in found:
        for layer, place in cells(kind, seed=2):
            name = kind if layer is None else f"blocks.{layer}.{kind}"
            if name in names:
                put = values[name], at_cell(kind, values[name].shape, place)
                patched = metric_of(
                    model, corrupted, real, name, lambda value, put=put: torch.where(put[1], put[0], value)
                )
                shown = found[kind].sel(place if layer is None else {"layer": layer, **place}).item()
                assert shown == pytest.approx(patched - base, abs=1e-3), (name, place)
                large += abs(patched - base) > 0.01
    assert large > 5


class Unchanged(torch.nn.Module):
    """Replaces a final norm with the identity."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return x


@pytest.fixture(scope="module")
def linear_at_the_end():
    """A model whose logits are linear in the output of the last attention: no norm, no last MLP."""
    hf = random_hf(dtype=torch.float64)
    hf.model.norm = Unchanged(hf.model.norm)
    hf.model.layers[-1].mlp.down_proj.weight.data.zero_()
    return sinklens.load(hf, check=False)  # the self-check finds that the last norm is not one


GIVEN_THE_OTHER = ["attn.hook_pattern", "attn.hook_v"]  # their product is linear in each; along a path both change


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("path", [0, 3])
@pytest.mark.parametrize(
    "name", ["hook_resid_post", "hook_attn_out", "attn.hook_z", "attn.hook_result", *GIVEN_THE_OTHER]
)
def test_the_estimate_is_exact_where_the_metric_is_linear(linear_at_the_end, name, path):
    """hook_pattern with explicit attention, the others with fused attention; values under a fixed pattern."""
    clean, corrupted = pair()
    asked = (linear_at_the_end, clean, corrupted, lambda logits: logits[:, :, 5].sum() - logits[:, :, 9].sum())
    estimate = attribution_patching(*asked, [f"blocks.-1.{name}"], path=path)
    truth = patching_effects(*asked, f"blocks.-1.{name}")
    exact = 1e-5 if name == "attn.hook_pattern" else 1e-9  # attention weights are in float32
    if path and name in GIVEN_THE_OTHER:
        assert float(abs(estimate - truth)[name].max()) > 0.1
    else:
        np.testing.assert_allclose(estimate[name], truth[name], rtol=exact, atol=exact)
    assert float(abs(truth[name]).max()) > 0.1
    assert estimate.attrs == pytest.approx(truth.attrs)


@pytest.mark.extended
def test_along_the_path_the_effects_of_the_embeddings_sum_to_the_total_effect(tiny_llada):
    """Integrated gradients are complete: the sum is the metric of the clean run minus that of the corrupted one."""
    clean, corrupted, metric = number_pair(tiny_llada, held_out(3)[2], 6)
    found = attribution_patching(tiny_llada, clean, corrupted, metric, "hook_embed", path=50)
    changed = found.clean - found.corrupted
    assert changed > 20
    assert float(found["hook_embed"].sum()) == pytest.approx(changed, rel=0.02)
    alone = attribution_patching(tiny_llada, clean, corrupted, metric, "hook_embed")
    assert abs(float(alone["hook_embed"].sum()) - changed) > 0.5 * changed


def number_pair(model, problem, new, step=None):
    """A step of a run on a word problem, the same step with the first number of the prompt changed, and a metric.

    The metric is the logit of the number minus that of the new one where the run copies it; the step is by default the
    one that writes the copy.
    """
    run = sinklens.generate(model, problem.prompt, record_sinks=False, progress=False)
    tokens = model.to_str_tokens(problem.prompt)
    column = next(i for i, token in enumerate(tokens) if re.fullmatch(r" \d+", token))
    good, bad = int(run.tokens[0, column]), model.tokenizer(f" {new}").input_ids[-1]
    written = int((run.tokens[0, run.prompt_length :] == good).nonzero()[0]) + run.prompt_length
    clean = of_step(run, int(run.unmask_step[0, written]) if step is None else step).ids
    corrupted = clean.clone()
    corrupted[0, column] = bad
    assert model.tokenizer.decode([bad]) == f" {new}"
    assert int(clean[0, written]) == model.mask_token_id
    return clean, corrupted, lambda logits: logits[0, written, good] - logits[0, written, bad]


def test_gradients_along_the_path_are_taken_at_the_midpoints_of_its_segments():
    model, (clean, corrupted), given = shared_model(), pair(), []

    def metric(logits):
        given.append(logits.detach())
        return bent(logits)

    attribution_patching(model, clean, corrupted, metric, "blocks.1.attn.hook_z", path=2)
    start, end = (plain_pass(model, ids).values["hook_embed"] for ids in (corrupted, clean))
    for share in (0.25, 0.75):
        edits = {"hook_embed": lambda value, share=share: start + share * (end - start)}
        logits = plain_pass(model, corrupted, edits=edits).logits
        assert sum(torch.allclose(logits, each, atol=1e-3) for each in given) == 1


def test_effects_of_a_batch_are_the_sum_of_its_rows():
    model, (clean, corrupted) = shared_model(), pair()

    def metric(logits):
        return logits[:, 2, 7].sum()

    for effects in (attribution_patching, patching_effects):
        asked = [(model, clean[rows], corrupted[rows], metric, "blocks.1.attn.hook_q") for rows in (slice(2), [0], [1])]
        both, first, second = (effects(*each)["attn.hook_q"] for each in asked)
        np.testing.assert_allclose(both, first + second, atol=1e-4)
        assert both.dims == ("layer", "head", "pos")


@pytest.mark.parametrize("family", ["dream", "llama"])
def test_the_metric_gets_logits_of_the_token_at_a_position_or_the_next_if_autoregressive(tmp_path, family):
    write_family(tmp_path, family)
    model, (clean, corrupted), given = sinklens.load(tmp_path), pair(), []

    def metric(logits):
        given.append(logits.detach())
        return logits.sum()

    attribution_patching(model, clean, corrupted, metric, "hook_embed")
    patching_effects(model, clean, corrupted, metric, "hook_embed", positions=[0])
    with torch.no_grad():
        expected = [model(ids) for ids in (clean, corrupted)]
    if family == "dream":
        expected = [torch.stack([row[[0, *range(LENGTH - 1)]] for row in logits]) for logits in expected]
    for logits in expected:
        assert sum(torch.allclose(logits, each, atol=1e-4) for each in given) >= 2


def test_kinds_of_points_become_variables_by_layer():
    model, (clean, corrupted) = shared_model(), pair()
    names = [
        "blocks.2.hook_out",
        "blocks.0.attn.hook_pattern",
        "blocks.0.hook_resid_post",
        "hook_embed",
        "blocks.-1.attn.hook_k",
    ]
    found = attribution_patching(model, clean, corrupted, bent, names)
    dims = {name: value.dims for name, value in found.items()}
    assert dims == {
        "hook_resid_post": ("layer", "pos"),
        "attn.hook_pattern": ("layer", "head", "query", "key"),
        "hook_embed": ("pos",),
        "attn.hook_k": ("layer", "kv_head", "pos"),
    }
    assert found.layer.values.tolist() == [0, 2]
    assert np.isnan(found["attn.hook_pattern"].sel(layer=2)).all()
    assert not np.isnan(found["hook_resid_post"]).any()
    part = patching_effects(model, clean, corrupted, bent, names[1:], heads=[-1, 0], positions=[4])
    assert part["attn.hook_pattern"].sizes == {"layer": 2, "head": 2, "query": 1, "key": LENGTH}
    assert part["attn.hook_k"].kv_head.values.tolist() == [0, 1]
    assert part["hook_embed"].pos.values.tolist() == [4]


def test_hooks_on_the_model_apply_to_both_runs():
    """A head that is switched off has no effect; the others do."""
    model, (clean, corrupted) = shared_model(), pair()

    def off(value, hook):
        value = value.clone()
        value[:, :, 2] = 0
        return value

    asked = (model, clean, corrupted, bent, "blocks.1.attn.hook_q")
    with model.tree.hooks(fwd_hooks=[("blocks.1.attn.hook_z", off)]):
        found = [attribution_patching(*asked)["attn.hook_q"], patching_effects(*asked)["attn.hook_q"]]
    for effects in found:
        assert float(abs(effects.sel(head=2)).max()) < 1e-6
        assert float(abs(effects).max()) > 1e-3


def state(model):
    """State that must be restored: hooks on points, gradients, and which weights require them."""
    hooks = [len(point.fwd_hooks) + len(point._functions) for point in model.tree.hook_dict.values()]
    return hooks, [(weight.grad is None, weight.requires_grad) for weight in model.tree.hf.parameters()]


def test_the_model_is_restored_even_after_an_error():
    model, (clean, corrupted) = random_model(), pair()
    next(model.tree.hf.parameters()).requires_grad_(False)
    before = state(model)
    with torch.no_grad():
        logits = model(clean)
    attribution_patching(model, clean, corrupted, bent, every_value)
    assert state(model) == before
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        attribution_patching(model, clean, corrupted, lambda logits: 1 / 0, every_value)
    assert state(model) == before
    with torch.no_grad():
        assert torch.equal(model(clean), logits)


def test_gradients_work_where_the_caller_has_disabled_them():
    model, (clean, corrupted) = shared_model(), pair()
    expected = attribution_patching(model, clean, corrupted, bent, every_value)
    with torch.inference_mode():
        xr.testing.assert_allclose(attribution_patching(model, clean + 0, corrupted + 0, bent, every_value), expected)
    with torch.no_grad():
        xr.testing.assert_allclose(attribution_patching(model, clean, corrupted, bent, every_value), expected)


def test_weights_without_gradients_are_rejected():
    with torch.inference_mode():
        model = random_model()
    with pytest.raises(SettingError, match=r"was created under torch.inference_mode\(\), so it has no gradients"):
        attribution_patching(model, *pair(), bent, "hook_embed")


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_of_step_returns_the_canvas_of_the_step(request, name):
    model = request.getfixturevalue(name)
    run = sinklens.generate(model, [problem.prompt for problem in held_out(3)], record_sinks=False, progress=False)
    end, padded = run.prompt_length + 4 if name == "tiny_llama" else run.canvas.shape[2], int((~run.real[1]).sum())
    ids, real, time = of_step(run, 4)
    assert time is None
    row = of_step(run, 4).row(1)
    assert padded > 0
    assert torch.equal(ids, run.canvas[:, 4, :end])
    assert torch.equal(real, run.real[:, :end])
    assert torch.equal(row.ids, run.canvas[1:2, 4, padded:end])
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, attention_mask=real)[1:2, padded:], model(row.ids, row.attention_mask), atol=1e-3, rtol=1e-3
        )
    assert torch.equal(of_step(run, -1).ids, of_step(run, run.steps_run - 1).ids)
    with pytest.raises(SettingError, match=r"step \d+ does not exist"):
        of_step(run, run.steps_run)


def test_agreement_by_hand():
    def effects(values):
        return xr.Dataset({"hook_embed": ("pos", values)}, {"pos": range(len(values))})

    score = agreement(effects([1.0, 2.0, 4.0, 9.0]), effects([2.0, 4.0, 8.0]))["hook_embed"]
    assert score == pytest.approx(Agreement(1.0, 0.5, 3, 1.0))
    score = agreement(effects([1.0, 2.0, 4.0]), effects([1.0, 4.0, 16.0]))["hook_embed"]  # in order, not on a line
    assert score.rank_correlation == pytest.approx(1.0)
    assert score.correlation < 0.99
    score = agreement(effects([1.0, np.nan, 3.0]), effects([0.0, 5.0, 0.0]))["hook_embed"]
    assert score.places == 2
    assert np.isnan([score.correlation, score.relative_error]).all()
    assert agreement(effects([1.0]), effects([1.0]).rename(hook_embed="hook_resid_pre")) == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"corrupted_ids": random_ids(2, 5)},
            r"the same shape and padding; got \[2, 6\] and \[2, 5\]. .*same number of tokens",
        ),
        ({"metric": lambda logits: logits[:, 0, 0]}, r"to a tensor with one number; got Tensor of shape \[2\]"),
        ({"metric": lambda logits: 1.0}, r"to a tensor with one number; got float"),
        ({"names": "blocks.0.attn.hook_attn_mask"}, r"hook_attn_mask cannot be patched from one pass into another"),
        ({"names": "denoise.hook_logits"}, r"denoise.hook_logits cannot be patched from one pass"),
    ],
)
@pytest.mark.parametrize("effects", [attribution_patching, patching_effects])
def test_invalid_input_is_rejected(effects, change, text):
    clean, corrupted = pair()
    given = {"clean_ids": clean, "corrupted_ids": corrupted, "metric": bent, "names": "hook_embed"} | change
    with pytest.raises(SettingError, match=text):
        effects(shared_model(), **given)


@pytest.mark.parametrize(
    ("effects", "change", "error", "text"),
    [
        (attribution_patching, {"metric": lambda logits: logits.argmax().float()}, SettingError, r"has no gradient"),
        (patching_effects, {"attention_mask": left_padding(2, 5)}, PromptError, r"\[2, 6\]; got \[2, 5\]"),
        (attribution_patching, {"names": "hook_x"}, HookNameError, r"no hook point is called 'hook_x'"),
        (
            attribution_patching,
            {"path": -1},
            SettingError,
            r"path must be 0 .* or a positive number of gradients .*; got -1",
        ),
        (patching_effects, {"heads": [6]}, SettingError, r"head 6 does not exist"),
        (patching_effects, {"positions": [6]}, SettingError, r"position 6 does not exist"),
        (patching_effects, {"at_once": 0}, SettingError, r"at_once must be at least 1; got 0"),
    ],
)
def test_unsupported_input_of_either_function_is_rejected(effects, change, error, text):
    with pytest.raises(error, match=text):
        effects(shared_model(), *pair(), **{"metric": bent, "names": "blocks.0.attn.hook_z"} | change)
