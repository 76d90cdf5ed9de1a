"""Patching: a run's own values change nothing, others only their place, and mismatches are rejected."""

import pytest
import torch
from building import EACH, random_ids, shared_model
from transformer_lens import ActivationCache
from watching import LONG, PADDED, Z, again, entered, logits_of, same, watch

from sinklens.errors import SettingError
from sinklens.hooks.names import axes_of
from sinklens.interventions import Activations, MaskKeys, PatchHooks

WAYS = [(*kind, {}) for kind in [*EACH, ("qwen3_moe", False), ("dream", False)]]
CAUSAL = [{}, {"use_cache": False}]
OTHER = "w9 w8 w7 w6 w5 w4 w3"
FEW = ["w1 w2 w3 w4"]


def everything(name):
    """Matches all points."""
    return True


def keep(model, prompts, names, **settings):
    """The caches of a run."""
    kept = Activations(names=names)
    watch(model, prompts, [kept], [], **settings)
    return kept.caches


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("architecture", "causal", "settings", "names"),
    [(*way, [Z, "blocks.0.hook_resid_post", "blocks.2.attn.hook_pattern"]) for way in WAYS]
    + [(*way, names) for way in (WAYS[0], WAYS[1], WAYS[-1]) for names in (Z, everything)],
)
def test_a_runs_own_values_change_nothing_bit_for_bit(worded, architecture, causal, settings, names):
    model, kept = worded(architecture, causal), Activations(names=names)
    base = watch(model, PADDED, [kept], ["hook_logits"], **settings)
    patched = watch(model, PADDED, [PatchHooks(source=kept.caches)], ["hook_logits"], **settings)
    assert sorted(kept.caches) == list(range(base.run.steps_run))
    assert same(patched, base)


def test_a_runs_own_values_change_only_rounding_where_queries_are_recomputed(worded):
    """A pass without a cache gets the values that its earlier queries had in shorter passes."""
    model, kept = worded("llama", True), Activations(names=["blocks.0.hook_resid_post", "blocks.2.attn.hook_pattern"])
    base = watch(model, PADDED, [kept], ["hook_logits"], use_cache=False)
    patched = watch(model, PADDED, [PatchHooks(source=kept.caches)], ["hook_logits"], use_cache=False)
    torch.testing.assert_close(logits_of(patched), logits_of(base), atol=1e-5, rtol=0)


PATCHES = {
    "a step's heads and positions": ([OTHER], {"steps": [0], "heads": [2, -1], "positions": [1, 3]}),
    "other lengths": (FEW, {"steps": [0], "positions": [3, -2]}),
    "other positions": (FEW, {"steps": [0], "positions": [3, -2], "source_positions": [0, 5]}),
    "other padding": (PADDED[::-1], {"steps": [0], "positions": [3, -2], "source_positions": [0, 5]}),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("architecture", "causal", "settings", "name"),
    [(*WAYS[0], name) for name in PATCHES] + [(*way, next(iter(PATCHES))) for way in WAYS[1:]],
)
def test_a_patch_puts_the_sources_values_at_its_steps_heads_and_positions_alone(
    worded, architecture, causal, settings, name
):
    model, (prompt, given) = worded(architecture, causal), PATCHES[name]
    source = keep(model, prompt, [Z], **settings)
    base = watch(model, PADDED, points=["1.attn.hook_z"], **settings)
    patch = PatchHooks(source=source, **given)
    patched = watch(model, PADDED, [patch], ["1.attn.hook_z"], replay=base.run, **settings)
    for step in given.get("steps", range(base.run.steps_run)):
        expected, new = base.values[step][Z].clone(), source[step][Z]
        put, heads = given.get("positions", range(-15, 0)), given.get("heads", slice(None))
        for row, start in ((0, 3), (1, 0)):
            for here, there in zip(put, given.get("source_positions", put), strict=True):
                column = here + start if here >= 0 else here
                padding = 3 - start if len(prompt) > 1 and there >= 0 else 0  # the source's rows are in reverse order
                expected[row, column, heads] = new[row % len(new), there + padding, heads]
        assert torch.equal(patched.values[step][Z], expected)
        assert not torch.equal(expected, base.values[step][Z])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("recorded", "settings"), [CAUSAL, CAUSAL[::-1]], ids=["kept with a cache", "kept without"])
@pytest.mark.parametrize(
    "given",
    [{"steps": [0]}, {"steps": [2]}, {}, {"steps": [0, 3], "positions": [1, 4, 6, 9], "heads": [0, 1]}],
    ids=repr,
)
def test_patches_are_the_same_with_and_without_a_cache(worded, recorded, settings, given):
    """Also when the values come from the other kind of run."""
    model = worded("llama", True)
    source = keep(model, [OTHER], [Z], **recorded)
    plain = watch(model, [LONG], [PatchHooks(source=keep(model, [OTHER], [Z]), **given)], ["hook_logits"])
    other = watch(model, [LONG], [PatchHooks(source=source, **given)], ["hook_logits"], **settings)
    assert torch.equal(other.run.canvas, plain.run.canvas)
    torch.testing.assert_close(logits_of(other), logits_of(plain), atol=1e-4, rtol=0)
    assert (logits_of(plain) - logits_of(watch(model, [LONG], [], ["hook_logits"]))).abs().max() > 0.1


@pytest.mark.parametrize("settings", CAUSAL)
def test_patterns_are_patched_where_their_queries_are_recomputed_at_later_steps(worded, settings):
    name = "blocks.1.attn.hook_pattern"
    model = worded("llama", True)
    source = keep(model, [OTHER], [name])
    base = watch(model, [LONG], [PatchHooks(source=source)], ["hook_logits"])
    other = watch(model, [LONG], [PatchHooks(source=source)], ["hook_logits", "hook_pattern"], **settings)
    torch.testing.assert_close(logits_of(other), logits_of(base), atol=1e-4, rtol=0)
    if settings:  # at the last step, the query of step 1 keeps its pattern, with zeros for later keys
        row = other.values[other.run.steps_run - 1][name][0, :, 7]
        torch.testing.assert_close(row[:, :8], source[1][name][0, :, -1])
        assert (row[:, 8:] == 0).all()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name", [Z, "blocks.1.attn.hook_pattern", "blocks.0.attn.hook_v", "blocks.1.attn.hook_attn_mask"]
)
@pytest.mark.parametrize(("architecture", "settings"), [
    ("llama", {"cache": "dual", "block_length": 4}), ("dream", {"cache": "delayed"}), ("sdar", {"use_cache": True}),
])  # fmt: skip
def test_values_of_an_exact_run_are_patched_where_a_run_with_a_cache_computes(model, settings, name):
    exact = {"block_length": 4} if "block_length" in settings else {}
    base = watch(model, PADDED, points=[], **settings).run
    source, after = Activations(names=name), Activations(names=[Z, name])
    watch(model, PADDED, [MaskKeys(keep=True, window=3, positions=[0]), source], [], replay=base, **exact)
    watch(model, PADDED, [PatchHooks(source=source.caches), after], [], replay=base, **settings)
    partial = 0
    for step, cache in after.caches.items():
        value, expected = cache[name], source.caches[step][name]
        window = cache.windows.get(Z, range(cache[Z].shape[1]))  # else it begins with the text
        for axis, kind in enumerate(axes_of(name)):
            complete = (
                kind == "pos" and value.shape[axis] == expected.shape[axis]
            )  # values of all columns, under a policy
            if kind in ("pos", "query", "query|1", "key") and not complete and expected.shape[axis] > 1:
                part = range(value.shape[axis]) if kind == "key" else window
                expected = expected.narrow(axis, part.start, len(part))
        partial += len(window) < base.canvas.shape[2]
        assert torch.equal(value, expected)
    assert partial > 1


def test_values_of_one_window_are_not_patched_into_another(worded):
    """The second block has as many positions as the first, so shapes alone would not show it."""
    model, kept = worded("sdar"), Activations(names=Z)
    watch(model, PADDED, [kept], [], use_cache=True)
    last = max(kept.caches)
    with pytest.raises(SettingError, match=rf"source has positions \d+ to \d+ of .*hook_z, and step {last} computes"):
        watch(model, PADDED, [PatchHooks(source={last: kept.caches[1]})], [], use_cache=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_single_pass_is_patched_as_step_0(causal):
    model, clean, corrupted = shared_model("llama", causal), random_ids(1), random_ids(1)
    logits = model(clean)
    kept = Activations(names=["blocks.1.hook_resid_post", "blocks.2.hook_resid_post"])
    model.run_with_hooks(clean, fwd_hooks=kept.hooks_for(model))
    patched = model.run_with_hooks(corrupted, fwd_hooks=PatchHooks(source=kept.caches, layers=[1]).hooks_for(model))
    torch.testing.assert_close(patched, logits, atol=1e-5, rtol=0)
    patch = PatchHooks(source=kept.caches, layers=[2], positions=[-1, 2])
    padded, real = torch.nn.functional.pad(corrupted, (2, 0)), torch.arange(9)[None] >= 2
    patched = model.run_with_hooks(padded, attention_mask=real, fwd_hooks=patch.hooks_for(model))
    expected = model(corrupted)
    expected[:, [2, 6]] = logits[:, [2, 6]]
    torch.testing.assert_close(patched[:, 2:], expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def source(worded):
    """Values of all steps of a run over `OTHER`."""
    return keep(worded(), [OTHER], [Z, "blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern"])


REFUSED = [
    ({"names": "hook_embed"}, r"source does not hold 'hook_embed'; it holds blocks\.1\.attn\.hook_pattern, blocks"),
    ({"steps": [4]}, "step 4 does not exist; there are 4"),
    ({"steps": [3], "only": [0, 1]}, r"source holds steps \[0, 1\], but not step 3; record it"),
    ({"heads": [6], "names": Z}, "head 6 does not exist; there are 6"),
    (
        {"heads": [1], "names": "blocks.1.hook_mlp_out"},
        r"blocks\.1\.hook_mlp_out has no head axis \(batch pos d_model\)",
    ),
    ({"positions": [15]}, "position 15 does not exist; there are 15"),
    (
        {"positions": [1, 2], "source_positions": [1]},
        "source_positions= pairs with positions=, of the same length, .*; got 1 and 2",
    ),
    ({"source_positions": [1]}, "got 1 and 0"),
    ({"positions": [1], "source_positions": [15]}, "position 15 does not exist; there are 15"),
    ({"names": Z, "layers": [0]}, r"'blocks.1.attn.hook_z' selects no hook point in layers \[0\]"),
    ({"layers": []}, "layers is empty, so PatchHooks would change nothing"),
    ({"steps": slice(1, 3)}, r"steps must be a list of integers, .* range\(3\) or None; got slice"),
    ({"prompts": FEW, "names": Z}, r"hook_z has shape \[1, 15, 6, 4\] in the source and \[1, 12, 6, 4\] here"),
    ({"prompts": ["w1", LONG], "names": Z}, "or its rows begin after other padding; for prompts of different lengths"),
    (
        {"prompts": FEW, "names": "blocks.1.attn.hook_pattern", "positions": [0]},
        r"patterns and scores can be patched only between runs of one length",
    ),
    (
        {"prompts": [LONG] * 3, "rows": [0, 0], "names": Z},
        r"source has 2 rows at blocks\.1\.attn\.hook_z, this run 3; pass one row or",
    ),
    (
        {"prompts": ["w1", " ".join(["w2"] * 9)], "positions": [10]},
        r"not every row has the positions \[10\]; patch rows of different lengths separately",
    ),
    ({"source": {}}, r"source holds no step; run the model that fills it first"),
    ({"source": {"hook_z": torch.zeros(1)}}, r"source maps steps to caches: pass the \.caches.*\{0: cache\}"),
    ({"source": Activations(names=Z)}, r"source maps steps to caches: pass the \.caches.*\{0: cache\}"),
    *(
        ({"only": steps}, r"source holds step 99, which does not exist in this run; it has 4, 0 to 3")
        for steps in ([99], [0, 99])
    ),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_what_the_source_or_the_run_lacks_is_rejected(model, source, unchecked, given, text):
    """`only` and `rows` are the steps and the rows of the source."""
    given = dict(given)
    prompts, rows = given.pop("prompts", [LONG]), given.pop("rows", None)
    steps = dict.fromkeys(given.pop("only"), source[0]) if "only" in given else source
    kept = {
        step: {name: value[rows] for name, value in cache.items()} if rows else cache for step, cache in steps.items()
    }
    with pytest.raises(SettingError, match=text):
        watch(model, prompts, [PatchHooks(**{"source": kept} | given)])


def test_kept_values_make_activation_caches_that_transformerlens_helpers_read(model):
    kept = Activations(names=everything, steps=[1, -1])
    watched = watch(model, PADDED, [kept], [])
    assert sorted(kept.caches) == [1, 3]
    cache = kept.caches[3]
    assert isinstance(cache, ActivationCache)
    plain = again(watched.run, 3).values
    real = entered(watched.run, 3)[1]
    accumulated, labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]
    torch.testing.assert_close(accumulated[3][real], plain["blocks.1.hook_resid_mid"][real], atol=1e-3, rtol=0)
    parts = cache.decompose_resid().sum(dim=0)
    torch.testing.assert_close(parts[real], plain["blocks.2.hook_resid_post"][real], atol=1e-3, rtol=0)
