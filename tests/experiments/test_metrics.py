"""A sweep of a metric against separate runs of every intervention, and which steps it runs."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from layouts import arguments, write_family, write_tokenizer

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import sweep
from sinklens.features import SpliceSAE
from sinklens.interventions import (
    Ablate,
    AblateHeads,
    AblateValues,
    Activations,
    HideKeys,
    MaskedLogits,
    MaskSinks,
    PatchHooks,
    PathPatch,
    SinkToken,
    Steer,
    Where,
)

PROMPTS = [[3, 17, 5, 44, 9], [21, 8]]
SHORT = {"gen_length": 6, "steps": 3}
SETTINGS = {"llada": {"steps": 4}, "dream": {"steps": 4}, "sdar": {"use_cache": False}, "ar": {}}


@dataclass(frozen=True, kw_only=True)
class FromTheStart(Ablate):
    """The same ablation, but not known to act on each step alone."""

    within_step: ClassVar[bool] = False
    point: str = "attn.hook_z"


def surprise(output):
    """KL of the step's distributions from the base run's, over the undecided positions of each prompt."""
    p, q = output.base.log_softmax(-1), output.logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    where = output.undecided if kl.shape == output.undecided.shape else torch.ones_like(kl, dtype=torch.bool)
    return torch.stack([row[keep].sum() for row, keep in zip(kl, where, strict=True)])


def separately(model, prompts, hooks, base, before, replay=True, **settings):
    """`surprise` [prompt, step], from complete runs that keep all logits."""
    read = Activations(names=["denoise.hook_logits"])
    run = sinklens.generate(
        model, prompts, hooks=[hooks, read], replay=base if replay else None, record_sinks=False, **settings
    )
    rows = []
    for step, cache in read.caches.items():
        logits, plain = cache["denoise.hook_logits"], before.caches[step]["denoise.hook_logits"]
        p, q = plain.log_softmax(-1), logits.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        undecided = (run.undecided[:, step] & run.real) if kl.shape[1] > 1 else torch.ones_like(kl, dtype=torch.bool)
        rows.append([row[keep].sum().item() for row, keep in zip(kl, undecided, strict=True)])
    return np.array(rows).T


def base_run(model, prompts, **settings):
    before = Activations(names=["denoise.hook_logits"])
    return sinklens.generate(model, prompts, hooks=[before], record_sinks=False, **settings), before


@pytest.fixture(scope="module")
def models(worded):
    """Random models by sampler, and an autoregressive one; fixed prompts of ids."""
    return {"llada": worded(), "dream": worded("dream"), "sdar": worded("sdar"), "ar": worded("qwen2", True)}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ["llada", "dream", "sdar", "ar"])
def test_a_metric_of_a_sweep_is_that_of_separate_runs(models, kind):
    model, settings = models[kind], {"gen_length": 4} | SETTINGS[kind]
    base, before = base_run(model, PROMPTS, **settings)
    listed = {
        "one step": AblateHeads(layers=[1], heads=[2], steps=[1]),
        "two steps": AblateHeads(layers=[0], heads=[0], steps=[0, -1]),
        "all steps": AblateHeads(layers=[2], heads=[3]),
        "previous": MaskSinks(top_k=1),
    }
    found = sweep(model, PROMPTS, listed, metric=surprise, replay=True, batch_size=6, **settings)
    for name, hooks in listed.items():
        expected = separately(model, PROMPTS, hooks, base, before, **settings)
        got = found["metric"].sel(intervention=name).to_numpy()
        ran = ~np.isnan(got)
        np.testing.assert_allclose(got[ran], expected[ran], atol=2e-4, err_msg=name)
        assert ran.any(axis=0).tolist() == [
            kind == "ar"
            or name in ("all steps", "previous")
            or step in {"one step": [1], "two steps": [0, base.settings.steps - 1]}[name]
            for step in range(base.steps_run)
        ]
    assert found["metric"].max() > 1e-3
    np.testing.assert_allclose(found["metric_base"], np.where(base.active, 0.0, np.nan), atol=1e-5)


def test_whatever_acts_on_each_step_alone_runs_only_its_step(models):
    """And what follows the run is run from its first step on."""
    model, settings = models["llada"], {"gen_length": 4, "steps": 4}
    base, before = base_run(model, PROMPTS, **settings)
    track = sinklens.generate(model, PROMPTS, **settings)
    where = torch.zeros(1, 1, 1, 1, base.canvas.shape[2], dtype=torch.bool)
    where[..., 5] = True
    alone = {
        "steer": Steer(torch.linspace(-1.0, 1.0, model.cfg.d_model), 3.0, layers=[1], where="masked", steps=[2]),
        "clamp": Ablate(point="hook_resid_pre", layers=[1], dims=[3], by=2.0, steps=[2]),
        "splice": SpliceSAE(Halved(), "blocks.1.hook_resid_post", steps=[2]),
        "hide": HideKeys(positions=[1], steps=[2]),
        "values": AblateValues(where=where, steps=[2]),
        "values of a run": AblateValues(top_k=1, source=track, steps=[2]),
        "values now": AblateValues(top_k=1, same_step=True, steps=[2]),
        "heads somewhere": AblateHeads(where=Where(top_k=2, source=track), heads=[1], steps=[2]),
    }
    following = {
        "values before": AblateValues(top_k=1, steps=[2]),
        "heads before": AblateHeads(where=Where(top_k=2), heads=[1], steps=[2]),
        "persistent": AblateValues(top_k=1, source=track, pick="random", persistent=True, steps=[2]),
    }
    found = sweep(model, PROMPTS, alone | following, metric=surprise, replay=True, **settings)["metric"]
    for name, hooks in (alone | following).items():
        expected, got = separately(model, PROMPTS, hooks, base, before, **settings), found.sel(intervention=name)
        np.testing.assert_allclose(got[:, 2], expected[:, 2], atol=2e-4, err_msg=name)
        assert np.isnan(got[:, [0, 1, 3]]).all() == (name in alone), name
        assert (got[:, 2] > 1e-4).any(), name


class Halved:
    """An autoencoder that returns half of what it gets."""

    def encode(self, x):
        return x

    def decode(self, features):
        return 0.5 * features


def test_places_make_a_map_and_only_the_named_steps_run(models, passed):
    model = models["llada"]
    places = {
        (layer, head, step): AblateHeads(layers=[layer], heads=[head], steps=[step])
        for layer in (0, 2) for head in range(6) for step in (0, 2)
    }  # fmt: skip
    found = sweep(model, PROMPTS[:1], places, metric=surprise, replay=True, batch_size=100, **SHORT)
    assert [*map(len, passed)] == [
        1,
        1,
        1,
        1,
        12,
        1,
        12,
    ]  # the base run; then the unchanged row and twelve heads, twice
    assert [*found["metric"].sizes.items()] == [("layer", 2), ("head", 6), ("step", 2), ("prompt", 1)]
    slow = {place: FromTheStart(layers=[place[0]], heads=[place[1]], steps=[place[2]]) for place in places}
    same = sweep(model, PROMPTS[:1], slow, metric=surprise, replay=True, batch_size=100, **SHORT)
    np.testing.assert_allclose(found["metric"], same["metric"], atol=1e-4)
    by_head = {(layer, head): AblateHeads(layers=[layer], heads=[head]) for layer in (0, 1) for head in (1, 4)}
    grid = sweep(model, PROMPTS, by_head, metric=surprise, replay=True, **SHORT)["metric"]
    single = sweep(model, PROMPTS, {"x": by_head[1, 4]}, metric=surprise, replay=True, **SHORT)["metric"]
    np.testing.assert_allclose(grid.sel(layer=1, head=4), single[0].T, atol=1e-4)


@pytest.mark.parametrize("path", [False, True])
def test_patches_run_the_steps_of_their_source(models, path):
    model, name = models["llada"], "blocks.0.attn.hook_z"
    kept = Activations(names=[name])
    sinklens.generate(model, [[9, 9, 9, 9, 9]], hooks=kept, **SHORT)
    at = {"source": {1: kept.caches[1]}}
    patch = PathPatch(sender="L0H1", receiver="L2H0.k", **at) if path else PatchHooks(names=[name], **at)
    found = sweep(model, PROMPTS[:1], {"patch": patch}, metric=surprise, replay=True, **SHORT)["metric"][0, 0]
    ran = [False, True, False]
    assert np.isnan(found).values.tolist() == [not one for one in ran]
    base, before = base_run(model, PROMPTS[:1], **SHORT)
    expected = separately(model, PROMPTS[:1], patch, base, before, **SHORT)[0]
    np.testing.assert_allclose(found[ran], expected[ran], atol=2e-4)


@pytest.mark.parametrize(("name", "settings", "size"), [
    ("fast-dllm-v2", {"gen_length": 12, "use_block_cache": True, "small_block_size": 2, "stop": False}, 2),
    ("tiny-two-modes", {"gen_length": 16, "mode": "diffusion", "stop": False}, 8),
])  # fmt: skip
def test_a_step_that_decides_a_part_of_its_queries_is_measured_at_those(tmp_path, name, settings, size):
    """In a sub-block of a block, read with a block cache; and in a block after the text before it."""
    write_family(tmp_path, "fast-dllm-v2")
    model = sinklens.load({"fast-dllm-v2": write_tokenizer(tmp_path)}.get(name, name), **arguments(name))
    _, before = base_run(model, PROMPTS[:1], **settings)
    gaps = {}

    def gap(output):
        expected = before.caches[output.step]["denoise.hook_logits"]
        fits = output.canvas.shape == output.undecided.shape == output.base.shape[:2] == expected.shape[:2]
        gaps[output.step] = (output.base - expected).abs().max().item() if fits else None
        return 0.0

    sweep(
        model, PROMPTS[:1], {"head": AblateHeads(layers=[0], heads=[0], steps=[2, 3])}, metric=gap, replay=True,
        **settings,
    )  # fmt: skip
    assert before.caches[2]["denoise.hook_logits"].shape[1] == size
    assert gaps == {step: pytest.approx(0.0, abs=1e-4) for step in before.caches}


def test_a_free_sweep_measures_every_step_of_the_changed_run(models):
    model = models["llada"]
    hooks, logits = AblateHeads(layers=[0]), MaskedLogits()
    run = sinklens.generate(model, PROMPTS, hooks=[hooks, logits], record_sinks=False, **SHORT)

    def masks(output):
        return output.undecided.sum(dim=1) * 100 + output.canvas[:, 3:].max(dim=1).values

    found = sweep(model, PROMPTS, {"heads": hooks}, metric=masks, **SHORT)["metric"][0]
    undecided = (run.undecided & run.real[:, None])[:, :-1]
    assert found.values.tolist() == (undecided.sum(dim=2) * 100 + run.canvas[:, :-1, 3:].amax(dim=2)).tolist()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"metric": lambda output: output.logits}, "one number for each of the 2 prompts in the batch; got a value of"),
        ({"replay": False, "interventions": {"x": SinkToken()}}, "x makes the canvas longer, so metric= cannot comp"),
        ({"interventions": {(0, 1): [], (0, 1, 2): []}}, "named by texts or, with metric=, all by"),
        ({"interventions": {(0, 1): [], "x": []}}, "named by texts or, with metric=, all by"),
        ({"metric": None, "interventions": {(0, 1): []}}, r"named by texts or, with metric=.*got \(0, 1\)"),
    ],
)
def test_a_sweep_of_a_metric_refuses_what_it_cannot_do(models, change, text):
    asked = {"interventions": {"x": AblateHeads(steps=[0])}, "metric": surprise, "replay": True, **SHORT} | change
    with pytest.raises(SettingError, match=text):
        sweep(models["llada"], PROMPTS, **asked)
