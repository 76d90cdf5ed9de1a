"""A kept pattern is repeated only in passes that compute the same positions."""

import pytest
import torch
from watching import LONG, PADDED, watch

from sinklens.errors import SettingError
from sinklens.interventions import FreezePattern, HoldSinks

DUAL = {"cache": "dual", "gen_length": 8, "block_length": 4, "steps": 8}  # steps 0 and 4 compute all positions
POINTS = ["hook_pattern", "hook_fresh"]


@pytest.mark.parametrize("kind", [FreezePattern, HoldSinks])
@pytest.mark.parametrize(("at", "later", "text"), [
    (2, 6, "step 2, which computed positions 7 to 10 with keys 0 to 14; step 6 computes positions 11 to 14 with"),
    (0, 1, "step 0, which computed positions 0 to 14 with keys 0 to 14; step 1 computes positions 7 to 10 with"),
])  # fmt: skip
def test_windows_of_different_positions_are_refused(worded, kind, at, later, text):
    with pytest.raises(SettingError, match=f"Hold repeats the values of {text}"):
        watch(worded(), [LONG], [kind(at=at, steps=[later])], **DUAL)


def test_steps_that_compute_the_same_positions_repeat_their_pattern(worded):
    name = "blocks.0.attn.hook_pattern"
    frozen = watch(worded(), PADDED, [FreezePattern(at=5, steps=[7])], **DUAL)
    assert torch.equal(frozen.values[7][name], frozen.values[5][name])
    assert not torch.equal(frozen.values[6][name], frozen.values[5][name])
    held = watch(worded(), PADDED, [HoldSinks(at=5, steps=[7])], **DUAL)
    kept, later = held.values[5][name], held.values[7][name]
    real = held.run.real
    sinks = (kept * real[:, None, 11:, None]).sum(dim=2).argmax(dim=-1)[:, :, None, None].expand(-1, -1, 4, 1)
    torch.testing.assert_close(later.gather(3, sinks), kept.gather(3, sinks), atol=1e-6, rtol=0)
    torch.testing.assert_close(later.sum(-1), kept.sum(-1), atol=1e-5, rtol=0)
