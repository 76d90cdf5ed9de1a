"""The loss of a canvas is the cross-entropy of the tokens behind its masks, row by row."""

import math

import pytest
import torch
from building import random_model

import sinklens
from sinklens.errors import SettingError

TEXTS = ["Question: Mia has 20 pens. How many are left?\nAnswer:", "Question: 3?"]


def naive(model, text, targets, gen_length):
    """−log p of each masked token of one canvas, from the logits of the transformers model."""
    canvas = model.to_canvas(text, gen_length)[0].tolist()
    with torch.no_grad():
        logits = model.tree.hf(torch.tensor([canvas])).logits[0].double()
    lost = []
    for position, token in enumerate(canvas):
        if token == model.mask_token_id:
            row = logits[position - 1 if model.family == "dream" else position]
            lost.append(math.log(sum(math.exp(x) for x in row.tolist())) - float(row[targets[position]]))
    return lost


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_the_loss_of_padded_canvases_is_the_mean_over_masks_and_then_over_rows(name):
    model, generator = sinklens.load(name), torch.Generator().manual_seed(0)
    canvas = model.to_canvas(TEXTS, 5)
    targets = torch.randint(10, 600, canvas.shape, generator=generator)
    canvas[1, -2:] = 300  # two positions of the second row are decided
    per_row = [naive(model, TEXTS[0], targets[0].tolist(), 5)]
    short = model.to_canvas(TEXTS[1], 5)
    rest = targets[1, -short.shape[1] :]
    short[0, -2:] = 300
    alone = model(short, return_type="loss", targets=rest[None])
    expected = torch.stack([torch.tensor(per_row[0]).mean().float(), alone]).mean()
    torch.testing.assert_close(model(canvas, return_type="loss", targets=targets), expected, atol=1e-4, rtol=1e-4)
    each = model(canvas, return_type="loss", targets=targets, loss_per_token=True)
    masked = canvas == model.mask_token_id
    torch.testing.assert_close(each[0][masked[0]], torch.tensor(per_row[0]).float(), atol=1e-4, rtol=1e-4)
    assert not each[~masked].any()
    logits, loss = model(canvas, return_type="both", targets=targets)
    torch.testing.assert_close(model.loss_fn(logits, canvas, targets=targets), loss)


def test_the_loss_of_a_canvas_has_gradients_at_its_points(tiny_llada):
    canvas = tiny_llada.to_canvas(TEXTS[0], 4)
    targets = torch.full_like(canvas, 300)
    _, cache = tiny_llada.run_with_cache(canvas, return_type="loss", targets=targets, incl_bwd=True)
    with torch.enable_grad(), tiny_llada.trace(canvas):
        stream = tiny_llada.blocks[1].hook_resid_pre.output
        loss = -tiny_llada.output[0, -4:].log_softmax(-1)[:, 300].mean()
        with loss.backward():
            gradient = stream.grad.save()
    torch.testing.assert_close(cache["blocks.1.hook_resid_pre_grad"], gradient, atol=1e-6, rtol=1e-4)


def test_a_block_causal_model_has_the_loss_of_one_block():
    tiny_sdar = sinklens.load("tiny-sdar")
    run = sinklens.generate(tiny_sdar, TEXTS[0], gen_length=16)
    canvas = run.tokens.clone()
    canvas[:, run.prompt_length :] = tiny_sdar.mask_token_id
    with pytest.raises(SettingError, match=r"row 0 has masks in blocks \d to \d, but a block-causal model"):
        tiny_sdar(canvas, return_type="loss", targets=run.tokens)
    single = run.tokens.clone()
    single[:, -3] = tiny_sdar.mask_token_id
    expected = -tiny_sdar(single)[0, -3].log_softmax(-1)[run.tokens[0, -3]]
    torch.testing.assert_close(tiny_sdar(single, return_type="loss", targets=run.tokens), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda canvas, targets: (canvas, None), r"does not say which tokens are behind its masks.*targets="),
        (lambda canvas, targets: (targets, targets), r"row 0 has no mask token \(60\)\. The loss of a diffusion model"),
        (lambda canvas, targets: (canvas, targets[:, 1:]), r"has the shape of the canvas, \[2, 6\]; got \[2, 5\]"),
        (lambda canvas, targets: (canvas, canvas), r"no token at some masked positions"),
    ],
)
def test_the_loss_of_a_canvas_without_known_tokens_is_refused(change, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model = random_model("llama", causal=False)
    targets = torch.arange(1, 13).view(2, 6)
    canvas = targets.masked_fill(targets % 3 == 0, 60)
    given, behind = change(canvas, targets)
    with pytest.raises(SettingError, match=message):
        model(given, return_type="loss", targets=behind)


@pytest.mark.parametrize(("name", "given", "message"), [
    ("tiny-llama", {"targets": torch.tensor([[5, 6]])}, "the targets of an autoregressive model are its input"),
    ("tiny-canvas", {}, "is not defined by one pass: its canvas is random tokens"),
])  # fmt: skip
def test_the_loss_of_other_models_has_no_targets(name, given, message):
    with pytest.raises(SettingError, match=message):
        sinklens.load(name)(torch.tensor([[5, 6]]), return_type="loss", **given)
