"""The sinks of the previous step: from a recorded run, from the step itself, and checks of the source track."""

import numpy as np
import pytest
import torch
from watching import LONG, PADDED, SHORT, add, again, compared, hidden, stacked, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import ForceTokens, KeepKeys, MaskSinks
from sinklens.sampling import DualCache
from sinklens.sinks import EpsilonOverMean, MeanPlusStd, Record, SinkRate, SinkTrack, SmallValueNorm, StrongestKeys

WAYS = [("llama", False, {}), ("dream", False, {}), ("qwen2", True, {}), ("qwen2", True, {"use_cache": False})]


def keys_of(model, masking, **settings):
    """The keys that are masked in a run, [batch, step, layer, head, pos]."""
    return masking.keys(watch(model, PADDED, [masking], [], record_sinks=True, **settings).run).to_numpy()


CHOSEN = {
    "strongest": ({"top_k": 3}, StrongestKeys(3)),
    "a detector of more than scores": ({"top_k": None, "detector": SmallValueNorm(0.8)}, SmallValueNorm(0.8)),
    "a detector of all layers": ({"top_k": None, "detector": SinkRate(0.1)}, SinkRate(0.1)),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("which", CHOSEN)
@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_a_recorded_runs_sinks_are_masked(model, settings, same_step, which):
    given, detector = CHOSEN[which]
    base = watch(model, PADDED, points=[], record_sinks=Record(["values"]), **settings).run
    masking = MaskSinks(**given, source=base, same_step=same_step, layers=[0, 2])
    wanted = base.sinks.detect(detector).shift(step=0 if same_step else 1, fill_value=False).to_numpy()
    wanted[:, :, 1] = False
    found = keys_of(model, masking, **settings)
    steps = min(found.shape[1], wanted.shape[1])
    np.testing.assert_array_equal(found[:, :steps], wanted[:, :steps])
    assert steps > 2
    assert wanted.any()


@pytest.mark.parametrize(
    ("detector", "cache"),
    [(EpsilonOverMean(epsilon=10, unit="percent"), DualCache()), (SinkRate(0.1), None), (MeanPlusStd(1.0), None)],
)
def test_a_detector_judges_all_layers_and_a_share_of_the_attention_of_the_computed_queries(worded, detector, cache):
    masking = MaskSinks(top_k=None, detector=detector, layers=[0, 2])
    run = sinklens.generate(worded(), PADDED, cache=cache, gen_length=8, block_length=4, hooks=masking)
    found = run.sinks.detect(detector).to_numpy()[:, :-1, [0, 2]]
    assert found.any()
    np.testing.assert_array_equal(masking.keys(run).to_numpy()[:, 1:, [0, 2]], found)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_steps_selected_from_a_source_keep_their_numbers(worded, architecture, causal, settings):
    """The sinks of steps 0 and 3 are masked at steps 1 and 4, as with the complete source, and none at the others."""
    model, settings = worded(architecture, causal), settings | ({} if causal else {"gen_length": 8, "steps": 8})
    base = watch(model, PADDED, points=[], record_sinks=True, **settings).run
    cut = keys_of(model, MaskSinks(top_k=2, source=base.sinks.isel(step=[0, 3])), **settings)
    np.testing.assert_array_equal(cut, keys_of(model, MaskSinks(top_k=2, source=base, steps=[1, 4]), **settings))
    assert cut.any(axis=(0, 2, 3, 4)).nonzero()[0].tolist() == [1, 4]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("kind", [MaskSinks, pytest.param(KeepKeys, marks=pytest.mark.extended)])
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_a_row_that_the_source_lacks_at_a_step_is_unchanged(model, causal, settings, short, kind):
    """The source's rows end after two steps and after all; each is masked as with a track of that row only."""
    tracks = [watch(model, [prompt], points=[], record_sinks=True, **settings).run.sinks for prompt in PADDED]
    tracks[short] = tracks[short].isel(step=slice(0, 2))
    together = ignored(model, PADDED, kind(top_k=2, source=SinkTrack.concat(tracks)), settings)
    for row, (prompt, track) in enumerate(zip(PADDED, tracks, strict=True)):
        alone = ignored(model, [prompt], kind(top_k=2, source=track), settings)
        assert {(step, 0, *rest) for step, of, *rest in together if of == row} == alone
        assert {step for step, *_ in alone} == ({1, 2} if row == short else set(range(1, 5 if causal else 4)))


def ignored(model, prompts, intervention, settings):
    """Keys masked for the newest query: (step, row, layer, head, position), not counting padding."""
    watched = watch(model, prompts, [intervention], ["hook_attn_mask"], **settings)
    found = set()
    for step in range(watched.run.steps_run):
        for layer, row, head, key in (watched.stacked("hook_attn_mask", step)[:, :, :, -1] == -torch.inf).nonzero():
            if watched.run.real[row, key]:
                start = int(watched.run.real[row].long().argmax())
                found.add((step, int(row), int(layer), int(head), int(key) - start))
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("architecture", ["llama", "dream"])
def test_same_step_masks_the_sinks_of_an_unmasked_pass_over_the_canvas(model):
    watched = watch(model, PADDED, [MaskSinks(top_k=2, same_step=True)], ["hook_pattern", "hook_logits"])

    def edits(step):
        scores = stacked(again(watched.run, step), "hook_sink_scores")
        keys = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)
        return {f"blocks.{layer}.attn.hook_attn_mask": add(hidden(keys[layer])[:, :, None]) for layer in range(3)}

    assert len(list(compared(watched, edits))) > 1


def test_same_step_sees_the_first_block_as_the_model_cards_sampler_does(worded):
    """Its prompt does not see the answer; the second pass finds the sinks that a run without masks recorded."""
    model, settings = worded("sdar"), {"sampler": "bd3lm-card", "gen_length": 6, "use_cache": False}
    base = sinklens.generate(model, PADDED, **settings)
    peeked, recorded = (
        watch(model, PADDED, [MaskSinks(top_k=2, **given)], ["hook_attn_mask"], replay=base, **settings)
        for given in ({"same_step": True}, {"same_step": True, "source": base.sinks})
    )
    for step in range(base.steps_run):
        found, expected = (watched.stacked("hook_attn_mask", step) for watched in (peeked, recorded))
        assert torch.equal(found, expected)
        assert (expected == -torch.inf).any()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("raw", [False, True], ids=["points", "modules"])
def test_a_trace_block_does_not_see_the_second_pass(tiny_llada, raw):
    prompt, settings = "Question: Tom has 2 apples.", {"gen_length": 4, "steps": 2, "record_sinks": False}
    seen, served = [], []
    hooks = [
        MaskSinks(top_k=5, same_step=True),
        ("blocks.1.hook_mlp_out", lambda value, hook: seen.append(value.clone())),
    ]
    with sinklens.trace(tiny_llada, prompt, hooks=hooks, **settings) as t:
        for _ in t.steps:
            served.append(t.hf.model.layers[1].mlp.output if raw else t["blocks.1.hook_mlp_out"])
    assert len(seen) == len(served) == 2
    assert all(torch.equal(a, b) for a, b in zip(seen, served, strict=True))


@pytest.fixture(scope="module")
def base(worded):
    """The sinks of a run of both prompts."""
    return watch(worded(), PADDED, points=[], record_sinks=True).run.sinks


REFUSED = [
    (
        lambda worded, base: watch(worded(), PADDED, [MaskSinks(top_k=None, detector=SmallValueNorm())]),
        r"SmallValueNorm\(ratio=0.2\) cannot be used here: .*source=run\.sinks",
    ),
    (
        lambda worded, base: KeepKeys().hooks_for(worded()),
        "MaskKeys finds its places in a run, which a single pass is not",
    ),
    (
        lambda worded, base: watch(worded(), [LONG], [MaskSinks(source=base)]),
        r"source is a run of kind diffusion with \{'batch': 2, .*this run diffusion with \{'batch': 1,",
    ),
    (
        lambda worded, base: watch(worded(), [SHORT, SHORT], [MaskSinks(source=base)]),
        "'pos': 15, .*'pos': 12",
    ),
    (
        lambda worded, base: watch(worded(), PADDED, [MaskSinks(source=base.isel(layer=[0, 1]))]),
        "'layer': 2, .*'layer': 3",
    ),
    (
        lambda worded, base: watch(worded("llama", True), PADDED, [MaskSinks(source=base)]),
        "source is a run of kind diffusion with .*, this run autoregressive with",
    ),
    (
        lambda worded, base: watch(worded("llama", True), PADDED, [MaskSinks(same_step=True)]),
        "same_step needs a second pass over the canvas; it is available in diffusion runs",
    ),
]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_cannot_be_a_source_is_rejected(worded, base, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded, base)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_a_source_of_another_prompt_of_equal_length_is_rejected(worded, architecture, causal, settings):
    model, other = worded(architecture, causal), "w7 w12 w33 w6"
    base = watch(model, PADDED, points=[], record_sinks=True, **settings).run
    for prompts, row in (([other, LONG], 0), (PADDED[::-1], 0)):
        with pytest.raises(SettingError, match=f"source was recorded with another prompt in row {row}"):
            watch(model, prompts, [MaskSinks(source=base)], **settings)
    swapped = ForceTokens(tokens={3: int(model.to_tokens("w6")[0, -1])}, steps=[0])  # a prompt edited on the canvas
    for source in (base, watch(model, PADDED, [swapped], points=[], record_sinks=True, **settings).run):
        assert watch(model, PADDED, [swapped, MaskSinks(source=source)], points=[], **settings).run.steps_run > 1
