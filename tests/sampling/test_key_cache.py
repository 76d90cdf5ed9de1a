"""What a step under a policy may decide, and which entries it may not use."""

import torch

import sinklens
from sinklens.caching import DualCache

PROMPTS = ["one two three four five six", "seven eight nine"]
ANSWER = {"gen_length": 12, "block_length": 6, "steps": 8, "sampler": "llada"}


def test_a_position_is_proposed_only_if_the_one_that_predicts_it_is_computed(worded):
    """Logits predict the next position. The first block keeps its last three masks, and the last of them is computed in
    the second block's steps, but only to predict the block's first position."""
    proposed, last = {}, 6 + 6 - 1  # the prompt has six columns

    def postpone(value, hook):
        proposed[hook.step] = value > -torch.inf
        if hook.step < 4:
            value[:, 9:12] = value[:, 9:12].clamp(max=-1.0)  # the least confident, but not excluded

    run = sinklens.generate(
        worded("dream"), PROMPTS, cache=DualCache(), by_quota=False, threshold=2.0,
        hooks=[("denoise.hook_confidence", postpone)], **ANSWER,
    )  # fmt: skip
    for_successor = 0
    for step in range(run.steps_run):
        computed = torch.from_numpy(run.sinks["fresh"].to_numpy()[:, step]).any(dim=1)
        predicted = torch.nn.functional.pad(computed[:, :-1], (1, 0))
        assert not (proposed[step] & ~(computed & predicted)).any()
        for_successor += int((computed & ~predicted & run.undecided[:, step])[:, last].sum())
    assert for_successor >= 2
