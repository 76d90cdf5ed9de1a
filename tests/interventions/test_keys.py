"""Hidden keys get no attention and nothing else changes; held sinks and patterns keep theirs."""

import itertools

import numpy as np
import pytest
import torch
import xarray as xr
from watching import LONG, PADDED, add, again, compared, entered, hidden, watch

from sinklens.errors import SettingError
from sinklens.interventions import FreezePattern, HideKeys, HoldSinks, MaskKeys


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
def test_hidden_keys_are_missing_from_the_softmax_at_their_steps_layers_and_heads(worded, architecture, causal):
    hide = HideKeys(positions=[0, 3], layers=[0], heads=[1, -1], steps=[0, 2])
    watched = watch(worded(architecture, causal), [LONG], [hide], ["hook_pattern", "hook_logits"])

    def edits(step):
        length = entered(watched.run, step)[0].shape[1]
        own = (torch.arange(length) - watched.run.prompt_length + 1).clamp(min=0) if causal else torch.tensor([step])
        keys = torch.zeros(1, 6, length, length, dtype=torch.bool)
        keys[:, [[1], [5]], :, [0, 3]] = ((own == 0) | (own == 2)).expand(length)
        return {"blocks.0.attn.hook_attn_mask": add(hidden(keys))}

    assert len(list(compared(watched, edits))) > 3


@pytest.mark.parametrize("causal", [False, True])
def test_each_layer_can_have_a_key_of_its_own(worded, causal):
    """One intervention per layer does what one with an array over layers does."""
    model, own = worded("llama", causal), {0: 3, 1: 0}
    listed = [HideKeys(positions=[key], layers=[layer]) for layer, key in own.items()]
    where = xr.DataArray(np.zeros((model.cfg.n_layers, 12 if causal else 15), dtype=bool), dims=("layer", "pos"))
    for layer, key in own.items():
        where[layer, key] = True
    runs = [
        watch(model, [LONG], hooks, ["hook_pattern"]) for hooks in (listed, [MaskKeys(where=where, queries="each")])
    ]
    for step, values in runs[0].values.items():
        for name, pattern in values.items():
            torch.testing.assert_close(runs[1].values[step][name], pattern, rtol=0, atol=0)
            for layer, key in own.items():
                assert (name == f"blocks.{layer}.attn.hook_pattern") == (not pattern[..., key].any())


HELD = [
    (HoldSinks(at=1, top_k=2, layers=[0], heads=[2, 5], steps=[2]), None),
    (FreezePattern(at=1, layers=[0], heads=[2, 5], positions=[0, 2, -1], steps=[0, 2]), [0, 2, -1]),
]


@pytest.mark.parametrize("architecture", ["llama", "dream"])
@pytest.mark.parametrize(("hold", "positions"), HELD, ids=["sinks", "rows"])
def test_held_attention_is_that_of_its_step_and_the_rest_shares_what_is_left(worded, architecture, hold, positions):
    """Row by row: the two strongest keys of step 1, or all keys of some queries."""
    watched = watch(worded(architecture), PADDED, [hold], ["hook_pattern", "hook_logits"])
    name = "blocks.0.attn.hook_pattern"
    then, real = watched.values[1][name], watched.run.real

    def change(pattern):
        pattern = pattern.clone()
        for row, head in itertools.product(range(2), (2, 5)):
            there = real[row].nonzero()[:, 0]
            sinks = then[row, head][there].sum(0).topk(2).indices if positions is None else slice(None)
            for query in there if positions is None else there[positions]:
                line = pattern[row, head, query].clone()
                line[sinks] = 0
                line *= (1 - then[row, head, query, sinks].sum()) / line.sum().clamp(min=1e-30)
                line[sinks] = then[row, head, query, sinks]
                pattern[row, head, query] = line
        return pattern

    assert len(list(compared(watched, lambda step: {name: change} if step == 2 else {}))) == 4
    assert (watched.values[2][name] - again(watched.run, 2).values[name]).abs().max() > 0.01


DUAL = {"cache": "dual", "gen_length": 8, "block_length": 4, "steps": 8}  # steps 0 and 4 compute all positions


def test_steps_that_compute_the_same_positions_repeat_their_pattern(worded):
    name = "blocks.0.attn.hook_pattern"
    frozen, held = (watch(worded(), PADDED, [kind(at=5, steps=[7])], **DUAL) for kind in (FreezePattern, HoldSinks))
    assert torch.equal(frozen.values[7][name], frozen.values[5][name])
    assert not torch.equal(frozen.values[6][name], frozen.values[5][name])
    kept, later = held.values[5][name], held.values[7][name]
    sinks = (kept * held.run.real[:, None, 11:, None]).sum(dim=2).argmax(dim=-1)[:, :, None, None].expand(-1, -1, 4, 1)
    torch.testing.assert_close(later.gather(3, sinks), kept.gather(3, sinks), atol=1e-6, rtol=0)
    torch.testing.assert_close(later.sum(-1), kept.sum(-1), atol=1e-5, rtol=0)


REFUSED = [
    (lambda worded: MaskKeys(), "MaskKeys needs where= or positions=, the keys that it changes"),
    (lambda worded: HideKeys(positions=[]), "positions is empty, so MaskKeys would change nothing"),
    (lambda worded: HoldSinks(at=0, top_k=0), "top_k must be an integer of at least 1 or None; got 0"),
    (lambda worded: watch(worded(), [LONG], [HideKeys(positions=[99])]), "position 99 does not exist"),
    (lambda worded: watch(worded(), [LONG], [HoldSinks(at=4)]), "step 4 does not exist; there are 4"),
    (
        lambda worded: watch(worded("llama", True), [LONG], [HoldSinks(at=0)]),
        "Hold repeats values of an earlier step of a diffusion run",
    ),
    (
        lambda worded: FreezePattern(at=0).hooks_for(worded()),
        "Hold repeats values of an earlier step of a diffusion run",
    ),
    (
        lambda worded: watch(worded(), [LONG], [FreezePattern(at=2, steps=[6])], **DUAL),
        "Hold repeats the values of step 2, which computed positions 7 to 10 with keys 0 to 14; step 6 computes "
        "positions 11 to 14 with",
    ),
    (
        lambda worded: watch(worded(), [LONG], [HoldSinks(at=0, steps=[1])], **DUAL),
        "Hold repeats the values of step 0, which computed positions 0 to 14 with keys 0 to 14; step 1 computes "
        "positions 7 to 10 with",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_settings_and_windows_without_a_meaning_are_rejected(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded)
