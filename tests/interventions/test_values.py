"""Values of sinks are replaced as in a loop over keys, and the attention of the layer stays the same."""

import numpy as np
import pytest
import torch
from building import EACH
from watching import PADDED, compared, entered, sinks_by_loop, stacked, unwatched, watch

from sinklens.errors import SettingError
from sinklens.interventions import AblateValues

MODELS = [*EACH, ("dream", False)]
WAYS = [*((*kind, {}) for kind in MODELS), ("qwen2", True, {"use_cache": False})]
ONE_OF_EACH = [("llama", False, {}), ("llama", True, {}), ("llama", True, {"use_cache": False})]


def replaced(model, keys, real, by, layers):
    """Edits for plain torch that recompute z key by key; `keys` is [layer, batch, head, query, key]."""
    seen, causal, size = {}, model.config.is_causal, model.block_length
    group = model.cfg.n_heads // model.cfg.n_key_value_heads

    def z_of(layer):
        def edit(z):
            values, weights = seen["v", layer], seen["pattern", layer]
            z = torch.zeros_like(z)
            for row, query, head in np.ndindex(*z.shape[:3]):
                last = (
                    int(real[row].nonzero()[0]) + (query - int(real[row].nonzero()[0])) // size * size + size - 1
                    if size
                    else 0
                )
                visible = [
                    key
                    for key in range(values.shape[1])
                    if real[row, key] and (not causal or key <= query) and (size is None or key <= last)
                ]
                if not visible:
                    continue
                own = values[row, visible, head // group]
                other = own.mean(dim=0) if by == "mean" else torch.zeros_like(own[0])
                value = torch.where(keys[layer, row, head, query, visible][:, None], other, own)
                z[row, query, head] = weights[row, head, query, visible] @ value
            return z

        return edit

    def kept(name, layer):
        return lambda value: seen.setdefault((name, layer), value)

    edits = {}
    for layer in layers:
        at = f"blocks.{layer}.attn"
        edits |= {
            f"{at}.hook_v": kept("v", layer),
            f"{at}.hook_pattern": kept("pattern", layer),
            f"{at}.hook_z": z_of(layer),
        }
    return edits


def check(model, prompts, ablate, heads=range(6), layers=range(3), steady=None, **settings):
    """Compare patterns and logits of a run with plain torch, step by step; `steady` is the run of the sinks."""
    watched = watch(model, prompts, [ablate], ["hook_pattern", "hook_logits"], **settings)
    run, causal, chosen = watched.run, bool(model.config.is_causal), {}

    def edits(step):
        ids, real = entered(run, step)
        keys = torch.zeros(3, len(ids), 6, ids.shape[1], ids.shape[1], dtype=torch.bool)
        for earlier, found in chosen.items():
            # a pass without a cache recomputes the queries that decoded earlier tokens
            rows = [run.prompt_length - 1 + earlier] if causal else slice(None) if earlier == step else []
            found = torch.nn.functional.pad(found[:, :, list(heads)], (0, ids.shape[1] - found.shape[-1]))
            for place, head in enumerate(heads):
                keys[:, :, head, rows] = found[:, :, place, None]
        return replaced(model, keys, real, ablate.by, layers)

    for step, plain in compared(watched, edits):
        top_k = ablate.where.top_k
        chosen[step + 1] = (
            sinks_by_loop(stacked(plain, "hook_pattern"), run, step, top_k=top_k)
            if steady is None
            else of_source(steady, step, top_k)
        )
    assert sum(int(found.sum()) for found in chosen.values()) > 100


def of_source(run, step, top_k):
    """The strongest keys of a recorded step, [layer, batch, head, key]."""
    top = torch.from_numpy(run.sinks.top(top_k).to_numpy()[:, step]).movedim(0, 1)
    length = run.prompt_length + step if run.model.config.is_causal else run.canvas.shape[2]
    return torch.zeros(*top.shape[:3], length, dtype=torch.bool).scatter(-1, top, True)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("by", ["mean", "zero"])
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_outputs_equal_those_of_a_loop_over_keys_with_other_values(worded, architecture, causal, settings, by):
    check(worded(architecture, causal), PADDED, AblateValues(top_k=2, by=by), **settings)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "causal", "settings"), ONE_OF_EACH)
def test_steady_sinks_of_some_heads_and_layers_are_replaced(worded, architecture, causal, settings):
    model = worded(architecture, causal)
    base = watch(model, PADDED, [], [], record_sinks=True, **settings).run
    ablate = AblateValues(top_k=2, source=base, heads=[1, 4], layers=[0, 2])
    check(model, PADDED, ablate, heads=[1, 4], layers=[0, 2], steady=base, **settings)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("by", ["mean", "zero"])
@pytest.mark.parametrize(
    ("architecture", "causal", "settings"), [*ONE_OF_EACH, ("sdar", False, {}), ("sdar", False, {"use_cache": True})]
)
def test_values_at_places_equal_those_of_a_loop_for_the_queries_of_each_step(
    worded, architecture, causal, settings, by
):
    """With cached blocks the places are constant, because the keys of finished blocks keep theirs."""
    model = worded(architecture, causal)
    base = watch(model, PADDED, [], [], **settings).run
    shape = (2, base.settings.steps, 3, 6, base.real.shape[1])
    marked = torch.from_numpy(np.random.default_rng(5).random(shape) < 0.3) & base.real[:, None, None, None]
    marked = marked[:, :1].expand(shape) if architecture == "sdar" else marked
    watched = watch(model, PADDED, [AblateValues(where=marked, by=by)], ["hook_z"], **settings)

    def edits(step):
        real = entered(watched.run, step)[1]
        length, own = real.shape[1], torch.arange(real.shape[1]) - base.prompt_length + 1
        own = own.clamp(min=0) if causal else torch.full((length,), step)
        keys = marked[:, own][..., :length].permute(2, 0, 3, 1, 4)  # [layer, batch, head, query, key]
        return replaced(model, keys, real, by, range(3))

    assert len(list(compared(watched, edits))) > 1
    assert unwatched(model)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_replacement_is_rejected(worded):
    with pytest.raises(SettingError, match="by must be one of mean, zero, resample; got 'median'"):
        AblateValues(top_k=1, by="median")
    with pytest.raises(SettingError, match="ReplaceValues finds its places in a run, which a single pass is not"):
        AblateValues(top_k=1).hooks_for(worded())
