"""Forced and remasked tokens and an extra token, against hand-made canvases and masks."""

import numpy as np
import pytest
import torch
from building import plain_pass, random_ids, shared_model
from watching import LONG, PADDED, again, compared, watch

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.interventions import AblateHeads, ForceTokens, Remask, SinkToken

DIFFUSION = ["llama", "qwen2", "qwen3", "dream"]
CAUSAL = [{}, {"use_cache": False}]
MASK = 60


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("architecture", "settings"), [("dream", {"sampler": "diffullama"}), *((one, {}) for one in DIFFUSION)]
)
def test_forced_tokens_are_on_the_canvas_and_decided_from_their_step_on(worded, architecture, settings):
    hooks = [ForceTokens(tokens={0: 41, -2: 42, -8: 43}, steps=[1]), AblateHeads(where="masked", steps=[1])]
    run = watch(worded(architecture), PADDED, hooks, [], record_sinks=True, **settings).run
    base = watch(worded(architecture), PADDED, [], [], **settings).run
    assert np.array_equal(run.chosen[0].places[:, 1, 0, 0], run.undecided[:, 1])
    assert torch.equal(run.canvas[:, 0], base.canvas[:, 0])
    expected = base.canvas[:, 1].clone()
    for row, start in ((0, 3), (1, 0)):
        expected[row, [start, -2, -8]] = torch.tensor([41, 42, 43])
    assert torch.equal(run.canvas[:, 1], expected)
    assert (run.canvas[:, 2:, [-2, -8]] == torch.tensor([42, 43])).all()


@pytest.mark.parametrize("settings", CAUSAL)
def test_a_forced_token_is_read_even_if_another_was_cached(worded, settings):
    """Forced at step 2: a token of the prompt, one decoded earlier, and one not decoded yet at step 2."""
    model = worded("llama", True)
    watched = watch(
        model, PADDED, [ForceTokens(tokens={1: 41, -5: 42, -3: 43}, steps=[2, 3])], ["hook_logits"], **settings
    )
    base, run = watch(model, PADDED, [], []).run, watched.run
    assert torch.equal(run.canvas[:, 1, :-4], base.canvas[:, 1, :-4])
    for row, start in ((0, 3), (1, 0)):
        assert run.canvas[row, 2, start + 1] == 41
    assert (run.canvas[:, 2, -5] == 42).all()
    assert (run.canvas[:, 2, -3] == -1).all()
    assert (run.canvas[:, 3, -3] == 43).all()
    for step in (1, 2, 3):
        wanted = again(run, step).logits[:, -1]
        torch.testing.assert_close(watched.values[step]["denoise.hook_logits"][:, -1], wanted, atol=1e-3, rtol=0)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("architecture", DIFFUSION)
def test_remasked_positions_are_decided_again_or_reported_as_masked(model, architecture):
    base = watch(model, PADDED, [], []).run
    decided = [position for position in range(-8, 0) if (base.canvas[:, 2, position] != MASK).any()]
    assert decided
    again_at_two = watch(model, PADDED, [Remask(positions=decided, steps=[2])], []).run
    assert torch.equal(again_at_two.canvas[:, :2], base.canvas[:, :2])
    assert (again_at_two.canvas[:, 2][:, decided] == MASK).all()
    everything = watch(model, PADDED, [Remask(steps=[-1])], []).run
    assert (everything.canvas[:, 3, 7:] == MASK).all()
    assert torch.equal(everything.canvas[:, 3, :7], base.canvas[:, 3, :7])
    left = (everything.tokens[:, 7:] == MASK).sum(dim=1).tolist()
    assert [answer.masks for answer in everything.answers] == left
    if architecture == "dream":  # its last step decides all remaining positions, unless it proposes the mask
        assert max(left) <= 2
    else:
        assert min(left) >= 6
        assert "positions still masked" in repr(everything)


def emptied(place):
    """An edit that puts zeros at a place of each row."""

    def empty(v):
        v = v.clone()
        v[[0, 1], place] = 0
        return v

    return empty


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("value", ["own", "zero"])
@pytest.mark.parametrize("architecture", DIFFUSION)
def test_an_extra_token_equals_one_on_the_canvas_that_sees_only_itself(model, value):
    """Against ids that contain the token, under a hand-made mask and values."""
    watched = watch(model, PADDED, [SinkToken(value=value, token=9)], ["hook_logits", "hook_pattern", "hook_v"])
    run = watched.run
    assert run.canvas.shape[2] == 16
    place, starts = [3, 0], [4, 1]
    for row, prompt in enumerate(PADDED):
        assert run.canvas[row, 0, place[row]] == 9
        words = [int(word[1:]) for word in prompt.split()]
        assert run.canvas[row, 0, starts[row] : starts[row] + len(words)].tolist() == words
        assert run.real[row].tolist() == [False] * (3 * (row == 0)) + [True] * (16 - 3 * (row == 0))
    assert all(answer.tokens <= 8 for answer in run.answers)

    def alone(bias):
        bias = bias.expand(-1, -1, 16, -1).clone()
        bias[[0, 1], :, place] = -torch.inf
        bias[[0, 1], :, place, place] = 0
        return bias

    edits = {f"blocks.{layer}.attn.hook_attn_mask": alone for layer in range(3)}
    edits |= {f"blocks.{layer}.attn.hook_v": emptied(place) for layer in range(3)} if value == "zero" else {}
    for step, _ in compared(watched, lambda step: edits):
        v, pattern = watched.stacked("hook_v", step), watched.stacked("hook_pattern", step)
        assert (v[:, [0, 1], place] == 0).all() == (value == "zero")
        for row, own in enumerate(place):
            assert torch.equal(pattern[:, row, :, own], torch.eye(16)[own].expand(3, 6, 16))
            assert (pattern[:, row, :, run.real[row], own] > 0).all()


@pytest.mark.parametrize("value", ["own", "zero"])
@pytest.mark.parametrize("settings", CAUSAL)
def test_in_an_autoregressive_run_the_token_is_first_and_a_zero_value_stays_zero(worded, settings, value):
    watched = watch(worded("qwen2", True), PADDED, [SinkToken(token=9, value=value)], ["hook_logits"], **settings)
    run = watched.run

    edits = {f"blocks.{layer}.attn.hook_v": emptied([3, 0]) for layer in range(3)} if value == "zero" else {}
    for step, _ in compared(watched, lambda step: edits):
        assert run.canvas[0, step, 3] == run.canvas[1, step, 0] == 9


def test_in_a_single_pass_the_first_id_is_the_extra_token():
    model, ids = shared_model(), random_ids()

    def alone(bias):
        bias = bias.expand(-1, -1, 7, -1).clone()
        bias[:, :, 0] = torch.where(torch.arange(7) == 0, 0.0, -torch.inf)
        return bias

    edits = {f"blocks.{layer}.attn.hook_attn_mask": alone for layer in range(3)}
    found = model.run_with_hooks(ids, fwd_hooks=SinkToken().hooks_for(model))
    torch.testing.assert_close(found, plain_pass(model, ids, edits=edits).logits, atol=1e-4, rtol=0)


def test_the_shipped_models_have_a_default_extra_token(tiny_llada, tiny_llama):
    for model in (tiny_llada, tiny_llama):
        run = sinklens.generate(model, "Question: Tom has 2 apples.", hooks=SinkToken(), gen_length=4)
        assert run.tokens[0, 0] == (model.special_tokens["start"] or model.special_tokens["end"])[0]
        assert run.sinks.data.sizes["pos"] == run.prompt_length + 4


REFUSED = [
    *(
        (lambda worded, causal=causal, hook=hook: watch(worded("llama", causal), [LONG], [hook]), text)
        for causal, hook, text in (
            (False, ForceTokens(tokens={15: 3}), "position 15 does not exist; there are 15"),
            (False, ForceTokens(tokens={0: 61}), "token 61 does not exist; the vocabulary is 0 to 60"),
            (False, Remask(positions=[6]), r"Remask takes positions of the answer, 7 to 14 or -8 to -1; got \[6\]"),
            (False, Remask(positions=[-9]), r"Remask takes positions of the answer, 7 to 14 or -8 to -1; got \[-9\]"),
            (True, Remask(), "has no mask token; use ForceTokens"),
            (False, SinkToken(token=61), "token 61 does not exist; the vocabulary is 0 to 60"),
        )
    ),
    (
        lambda worded: watch(worded(), [LONG], [ForceTokens(tokens={0: " 5"})]),
        "token ' 5' does not exist; the vocabulary is 0 to 60",
    ),
    (lambda worded: SinkToken(value="one"), "value must be one of own, zero; got 'one'"),
    (lambda worded: SinkToken(heads=[1]), "SinkToken does not support heads=; leave it out"),
    (lambda worded: SinkToken(positions=[1]), "SinkToken does not support positions=; leave it out"),
    (lambda worded: ForceTokens(tokens={}, positions=[1]), "ForceTokens does not support positions=; leave it out"),
    (lambda worded: Remask(layers=[1]), "Remask does not support layers=; leave it out"),
    (
        lambda worded: ForceTokens(tokens={1: 2}).hooks_for(worded()),
        "ForceTokens changes the canvas of a run; for a single",
    ),
    (lambda worded: Remask().hooks_for(worded()), "Remask changes the canvas of a run; for a single pass"),
]


@pytest.mark.usefixtures("unchecked", "model")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_edits_without_a_meaning_are_rejected(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded)


def test_an_extra_token_takes_one_position_of_the_context():
    model, settings = shared_model(), {"gen_length": 4, "steps": 2, "block_length": 4}
    full = [int(token) for token in random_ids(1, 60)[0]]  # of 64
    assert sinklens.generate(model, full, **settings).tokens.shape == (1, 64)
    message = "has 64 positions, and a pass would need 65, .* has 61 tokens, 1 of them added to it, and gen_length is 4"
    with pytest.raises(PromptError, match=message):
        sinklens.generate(model, full, hooks=[SinkToken(token=9)], **settings)
    assert sinklens.generate(model, full[1:], hooks=[SinkToken(token=9)], **settings).tokens.shape == (1, 64)
