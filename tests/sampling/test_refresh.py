"""A refresh in the middle of a block is a complete step like the block's first one."""

import pytest

import sinklens
from sinklens.sampling import Evict, KeepSinks, Refresh
from sinklens.sinks import TopK

PROMPTS = ["one two three four five six", "seven eight nine"]


@pytest.mark.parametrize("within", [Evict(keep=0.4), KeepSinks(TopK(1), others="gone")], ids=repr)
def test_keys_are_chosen_again_after_each_refresh_and_hidden_until_the_next(worded, within):
    run = sinklens.generate(worded("llama"), PROMPTS, cache=Refresh(every=4, within=within), gen_length=12,
                            block_length=12)  # fmt: skip
    hidden = (run.sinks["staleness"].to_numpy() < 0) & run.real.numpy()[:, None, None]
    scores, start, real = run.sinks.scores().fillna(-1).to_numpy(), run.prompt_length, run.real.numpy()
    first = 2 if isinstance(within, Evict) else 1  # eviction computes everything in two steps of a block
    assert not hidden[:, [0, 4, 8]].any()
    for row in range(2):
        outside = [j for j in range(start) if real[row, j]]
        for step, layer in ((step, layer) for step in range(run.steps_run) for layer in range(scores.shape[2])):
            if step % 4 == 0 or step < first:
                continue
            kept = {j for j in outside if not hidden[row, step, layer, j]}
            if isinstance(within, Evict):
                assert len(kept) == int(0.4 * len(outside))
            else:
                complete = scores[row, step - step % 4, layer]
                assert kept == {int(head.argmax()) for head in complete} & set(outside)
            if step % 4 > first:
                assert (hidden[row, step, layer] == hidden[row, step - 1, layer]).all()
