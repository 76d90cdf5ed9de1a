"""Paths across steps, against a chain of plain passes and decisions written out."""

import pytest
import torch
from building import plain_pass, shared_model
from path_oracle import brute_force

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import path_across_steps
from sinklens.interventions import Activations

MASK, LENGTH, PROMPT = 60, 6, [3, 17, 5, 44, 9]


def decided(canvas, logits):
    """The canvas after its most confident masked position is decided, as LLaDA does with one token a step."""
    best = logits.softmax(-1).max(-1)
    place = int(best.values[0].masked_fill(canvas[0] != MASK, -1).argmax())
    changed = canvas.clone()
    changed[0, place] = best.indices[0, place]
    return changed


def chain(model, base, other, sender, receiver, step, last, through):
    """Canvas and logits at the receiver's step, by plain passes."""
    here = base.canvas[:, step]
    canvas = decided(here, brute_force(model, here, other, sender, "logits"))
    if through == "frozen":
        canvas = torch.where(canvas != base.canvas[:, step + 1], canvas, base.canvas[:, last])
    else:
        for _ in range(step + 1, last):
            canvas = decided(canvas, plain_pass(model, canvas).logits)
    return canvas, brute_force(model, base.canvas[:, last], canvas, "embed", receiver)


@pytest.mark.parametrize("through", ["canvas", "frozen"])
@pytest.mark.parametrize(("sender", "receiver", "last"), [("1_mlp_out", "L2H4.q", 2), ("0_mlp_out", "L1H0.k", 3)])
def test_a_path_across_steps_equals_a_chain_of_plain_passes(sender, receiver, last, through):
    model, step = shared_model("qwen3"), 1
    base = sinklens.generate(model, [PROMPT], gen_length=LENGTH, steps=LENGTH, record_sinks=False)
    other = base.canvas[:, step].clone()
    torch.manual_seed(1)
    other[0, :5] = torch.randint(0, MASK - 1, (5,))
    source = {step: model.tree.run_with_cache(other)[1]}
    found = path_across_steps(base, sender, receiver, source, step=step, receiver_step=last, through=through)
    with torch.no_grad():
        canvas, logits = chain(model, base, other, sender, receiver, step, last, through)
    assert torch.equal(found.canvas, canvas)
    assert found.changed.any()
    read = Activations(names=["denoise.hook_logits"], steps=[last])
    run = sinklens.generate(
        model, [PROMPT], gen_length=LENGTH, steps=LENGTH, hooks=[found.patch, read], replay=base, record_sinks=False
    )
    assert torch.equal(run.canvas, base.canvas)
    patched = read.caches[last]["denoise.hook_logits"]
    torch.testing.assert_close(patched, logits, atol=1e-5 * float(logits.abs().max()), rtol=0)


def test_paths_that_run_backwards_or_share_more_than_the_canvas_are_refused():
    base = sinklens.generate(shared_model(), [PROMPT], gen_length=4, steps=4, record_sinks=False)
    with pytest.raises(SettingError, match="the receiver's step must be later than the sender's; got 1 and 2"):
        path_across_steps(base, "L0H0", "logits", {}, step=2, receiver_step=1)
    edited = sinklens.generate(
        shared_model(), [PROMPT], gen_length=4, steps=4, record_sinks=False,
        hooks=[("denoise.hook_logits", lambda value, hook: value.roll(1, dims=-1))],
    )  # fmt: skip
    source = {2: shared_model().tree.run_with_cache(base.canvas[:, 2])[1]}
    with pytest.raises(SettingError, match="the base run cannot be repeated: its canvases differ without its hooks"):
        path_across_steps(edited, "L0H0", "logits", source, step=2, receiver_step=3)
    cached = sinklens.generate(shared_model(), [PROMPT], gen_length=4, steps=4, record_sinks=False, cache="dual")
    with pytest.raises(SettingError, match=r"with cache=DualCache\(\), steps share keys and values"):
        path_across_steps(cached, "L0H0", "logits", source, step=2, receiver_step=3)
    written = sinklens.generate(shared_model("qwen2", True), [PROMPT], gen_length=4, record_sinks=False)
    with pytest.raises(SettingError, match="steps of an autoregressive run share keys and values"):
        path_across_steps(written, "L0H0", "logits", {}, step=1, receiver_step=2)
