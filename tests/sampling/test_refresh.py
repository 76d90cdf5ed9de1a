"""A refresh in the middle of a block is a complete step like the block's first one."""

from asked import WORDS as PROMPTS

import sinklens
from sinklens.sampling import KeepSinks, Refresh
from sinklens.sinks import TopK


def test_keys_are_chosen_again_after_each_refresh_and_hidden_until_the_next(worded):
    within = KeepSinks(TopK(1), others="gone")
    run = sinklens.generate(worded("llama"), PROMPTS, cache=Refresh(every=4, within=within), gen_length=12,
                            block_length=12)  # fmt: skip
    hidden = (run.sinks["staleness"].to_numpy() < 0) & run.real.numpy()[:, None, None]
    scores, start, real = run.sinks.scores().fillna(-1).to_numpy(), run.prompt_length, run.real.numpy()
    assert not hidden[:, [0, 4, 8]].any()
    for row in range(2):
        outside = {j for j in range(start) if real[row, j]}
        for step, layer in ((step, layer) for step in range(run.steps_run) for layer in range(scores.shape[2])):
            if step % 4:
                strongest = {int(head.argmax()) for head in scores[row, step - step % 4, layer]}
                assert {j for j in outside if not hidden[row, step, layer, j]} == strongest & outside
