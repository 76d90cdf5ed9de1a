"""Path patching against three passes in plain torch (path_oracle.py)."""

import pytest
import torch
from building import VARIANTS as MODELS
from building import plain_pass, random_ids, shared_model
from path_oracle import brute_force

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import Activations, PathPatch

PATHS = [
    ("embed", "L0H1.q"),
    ("L0H4", "L1H1.k"),
    ("L0H4", "L2H5.q"),
    ("0_mlp_out", "L2H0.v"),
    ("L1H2", "1_mlp_in"),
    ("0_mlp_out", "2_mlp_in"),
    ("embed", "logits"),
    ("L1H3", "logits"),
    ("2_mlp_out", "logits"),
]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)


def cached(model, ids):
    return model.run_with_cache(ids)[1]


@pytest.mark.fast_cases(5)
@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
@pytest.mark.parametrize(
    ("kind", "sender", "receiver"),
    [(kind, *path) for kind in MODELS for path in (PATHS if kind == "normed" else PATHS[1:5:3])],
)
def test_a_patched_path_equals_three_plain_passes(kind, sender, receiver):
    model, ids, other = MODELS[kind](), random_ids(), random_ids()
    patch = PathPatch(sender=sender, receiver=receiver, source={0: cached(model, other)})
    found = model.run_with_hooks(ids, fwd_hooks=patch.hooks_for(model))
    expected = brute_force(model, ids, other, sender, receiver)
    close(found, expected)
    assert (expected - plain_pass(model, ids).logits).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
def test_positions_restrict_the_path_to_queries_or_keys():
    model, ids, other = shared_model("qwen3"), random_ids(), random_ids()
    source = {0: cached(model, other)}
    for receiver in ("L1H1.k", "L2H5.q"):
        patch = PathPatch(sender="L0H4", receiver=receiver, source=source, positions=[2, -1])
        found = model.run_with_hooks(ids, fwd_hooks=patch.hooks_for(model))
        close(found, brute_force(model, ids, other, "L0H4", receiver, positions=(2, 6)))


def test_a_run_patched_with_its_own_values_is_unchanged_bit_for_bit():
    model = shared_model("qwen3")
    kept = Activations(names=["blocks.0.attn.hook_z", "hook_embed", "denoise.hook_logits"])
    prompts = [[3, 17, 5, 44, 9], [21, 8]]
    base = sinklens.generate(model, prompts, gen_length=4, steps=3, hooks=kept)
    source, logits = kept.caches, kept.caches[2]["denoise.hook_logits"]
    names = {
        step: {name: cache[name] for name in ("blocks.0.attn.hook_z", "hook_embed")} for step, cache in source.items()
    }
    patch = PathPatch(sender=["L0H1", "embed"], receiver=["L1H2.q", "logits"], source=names)
    again = Activations(names=["denoise.hook_logits"])
    run = sinklens.generate(model, prompts, gen_length=4, steps=3, hooks=[patch, again], replay=base)
    assert torch.equal(run.canvas, base.canvas)
    assert torch.equal(again.caches[2]["denoise.hook_logits"], logits)


def test_a_path_can_follow_positions_by_step():
    """where= gives what positions= gives at each step."""
    model, prompts = shared_model("qwen3"), [[3, 17, 5, 44, 9]]
    kept = Activations(names=["blocks.0.attn.hook_z"])
    sinklens.generate(model, [[9, 8, 7, 6, 5]], gen_length=4, steps=2, hooks=kept)
    base, path = sinklens.generate(model, prompts, gen_length=4, steps=2), {"sender": "L0H4", "receiver": "L1H1.k"}
    where = torch.zeros(1, 2, 1, 1, 9, dtype=torch.bool)
    where[0, [0, 1], 0, 0, [2, 3]] = True
    following = [PathPatch(**path, source=kept.caches, where=where)]
    static = [PathPatch(**path, source={step: kept.caches[step]}, positions=[2 + step]) for step in (0, 1)]
    logits = []
    for hooks in (following, static, []):
        read = Activations(names=["denoise.hook_logits"])
        sinklens.generate(model, prompts, gen_length=4, steps=2, hooks=[*hooks, read], replay=base)
        logits.append(torch.stack([read.caches[step]["denoise.hook_logits"] for step in (0, 1)]))
    assert torch.equal(logits[0], logits[1])
    assert ((logits[0] - logits[2]).abs().amax(dim=(1, 2, 3)) > 1e-4).all()


def test_an_autoregressive_run_is_the_same_with_a_cache_and_without():
    model = shared_model("qwen2", True)
    kept = Activations(names=["blocks.0.hook_mlp_out"])
    sinklens.generate(model, [[9, 8, 7, 6]], gen_length=4, hooks=kept)
    logits = []
    for use_cache in (True, False):
        read = Activations(names=["denoise.hook_logits"])
        patch = PathPatch(sender="0_mlp_out", receiver=["L1H0.k", "L2H3.q"], source=kept.caches, steps=[1, 2])
        base = sinklens.generate(model, [[3, 17, 5, 44]], gen_length=4, use_cache=use_cache)
        sinklens.generate(model, [[3, 17, 5, 44]], gen_length=4, use_cache=use_cache, hooks=[patch, read], replay=base)
        logits.append(torch.stack([read.caches[step]["denoise.hook_logits"] for step in range(4)]))
    close(logits[0], logits[1])


SOURCE = {0: {"hook_embed": None}}
REFUSED = [
    ({"sender": "L1H2", "receiver": "L1H0.q"}, r"L1H0\.q does not read what L1H2 writes in the same step; choose a "),
    ({"sender": "1_mlp_out", "receiver": "1_mlp_in"}, "1_mlp_in does not read what 1_mlp_out writes"),
    ({"sender": "head 3"}, "'head 3' is not among .* components, .* a sender is 'embed', 'L1H3'"),
    ({"receiver": "L1H3"}, r"'L1H3' is not among .*, a receiver 'L2H4\.q'"),
    ({"receiver": "L1H2.k"}, r"'L1H2\.k' is not among"),
    ({"sender": "L7H0"}, "'L7H0' is not among the 22 components, which are embed, L0H0 to 2_mlp_out"),
    ({"sender": []}, "sender is empty, so PathPatch would change nothing"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_paths_that_do_not_exist_are_refused(given, text):
    model = shared_model()
    with pytest.raises(SettingError, match=text):
        PathPatch(**{"sender": "embed", "receiver": "logits", "source": SOURCE} | given).hooks_for(model)
