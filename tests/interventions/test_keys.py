"""Hidden keys get no attention and nothing else changes; held sinks and patterns keep theirs."""

import pytest
import torch
from watching import LONG, PADDED, again, watch

from sinklens.errors import SettingError
from sinklens.interventions import FreezePattern, HideKeys, HoldSinks, MaskKeys


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
def test_hidden_keys_are_missing_from_the_softmax_at_their_steps_layers_and_heads(worded, architecture, causal):
    """The expected pattern is that of a plain pass whose scores lack the keys."""
    hide = HideKeys(positions=[0, 3], layers=[0], heads=[1, -1], steps=[0, 2])
    watched = watch(worded(architecture, causal), [LONG], [hide], ["hook_pattern", "hook_attn_scores"])
    name = "blocks.0.attn.hook_pattern"
    for step in range(4):
        plain = again(watched.run, step).values[name]
        pattern = watched.values[step][name]
        plain = plain[:, :, -pattern.shape[2] :]
        expected = plain.clone()
        if step in (0, 2):
            left = plain[:, [1, 5]].clone()
            left[..., [0, 3]] = 0
            expected[:, [1, 5]] = left / left.sum(-1, keepdim=True).clamp(min=1e-30)
        torch.testing.assert_close(pattern, expected, atol=1e-5, rtol=0)


def test_held_sinks_keep_the_attention_of_their_step_and_the_rest_shares_what_is_left(worded):
    """Written out per row, from the run's own kept pattern and a plain pass over its canvas."""
    hold = HoldSinks(at=1, top_k=2, layers=[0], heads=[2, 5], steps=[2])
    watched = watch(worded(), PADDED, [hold])
    name = "blocks.0.attn.hook_pattern"
    kept = watched.values[1][name]
    plain = {step: again(watched.run, step).values[name] for step in (1, 2, 3)}
    torch.testing.assert_close(kept, plain[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(watched.values[3][name], plain[3], atol=1e-6, rtol=0)
    expected = plain[2].clone()
    for row in range(2):
        real = watched.run.real[row]
        for head in (2, 5):
            sinks = kept[row, head][real].sum(0).topk(2).indices
            for query in real.nonzero()[:, 0].tolist():
                line = plain[2][row, head, query].clone()
                line[sinks] = 0
                line *= (1 - kept[row, head, query, sinks].sum()) / line.sum()
                line[sinks] = kept[row, head, query, sinks]
                expected[row, head, query] = line
    real = watched.run.real[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(watched.values[2][name][real], expected[real], atol=1e-6, rtol=0)
    assert (watched.values[2][name] - plain[2]).abs().max() > 0.01


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
