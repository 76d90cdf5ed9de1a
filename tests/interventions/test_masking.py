"""Masked and kept keys, windows and replaced values against loops in plain torch, with and without a cache.

Rule × action × model: a rule says which keys, by a loop over the patterns; an action what becomes of them.
"""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from asked import PROMPT
from building import EACH
from torch import Tensor
from watching import LONG, PADDED, add, compared, entered, hidden, logits_of, same, sinks_by_loop, stacked, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.hooks.attention import attention
from sinklens.interventions import AblateHeads, AblateValues, KeepKeys, MaskKeys, MaskSinks
from sinklens.interventions.masking import Hide
from sinklens.sinks import EpsilonOverMean, TopK

MODELS = [*EACH, ("qwen3_moe", False), ("dream", False), ("sdar", False)]
WAYS = [*((*kind, True if kind[1] else None) for kind in MODELS), ("llama", True, False)]
ONE_OF_EACH = [("llama", False, None), ("llama", True, True)]


def cache_of(cached: bool | None) -> dict[str, Any]:
    """The setting that says whether an autoregressive run keeps keys and values."""
    return {} if cached is None else {"use_cache": cached}


def replaced(model, keys, real, by, layers=range(3)):
    """Edits for plain torch that recompute z key by key; `keys` is [layer, batch, head, query, key]."""
    seen, causal, size = {}, model.config.is_causal, model.block_length
    group = model.cfg.n_heads // model.cfg.n_key_value_heads

    def z_of(layer):
        def edit(z):
            values, weights = seen["v", layer], seen["pattern", layer]
            z = torch.zeros_like(z)
            for row, query, head in np.ndindex(*z.shape[:3]):
                last = (
                    int(real[row].nonzero()[0]) + (query - int(real[row].nonzero()[0])) // size * size + size - 1
                    if size
                    else 0
                )
                visible = [
                    key
                    for key in range(values.shape[1])
                    if real[row, key] and (not causal or key <= query) and (size is None or key <= last)
                ]
                if not visible:
                    continue
                own = values[row, visible, head // group]
                other = own.mean(dim=0) if by == "mean" else torch.zeros_like(own[0])
                value = torch.where(keys[layer, row, head, query, visible][:, None], other, own)
                z[row, query, head] = weights[row, head, query, visible] @ value
            return z

        return edit

    def kept(name, layer):
        return lambda value: seen.setdefault((name, layer), value)

    edits = {}
    for layer in layers:
        at = f"blocks.{layer}.attn"
        edits |= {
            f"{at}.hook_v": kept("v", layer),
            f"{at}.hook_pattern": kept("pattern", layer),
            f"{at}.hook_z": z_of(layer),
        }
    return edits


def hide(model, keys, real, rows):
    """Edits that hide the keys from the queries."""
    return {f"blocks.{layer}.attn.hook_attn_mask": add(hidden(keys[layer])) for layer in range(3)}


def keep(model, keys, real, rows):
    """Edits that hide all keys but these, and neighbors at a distance of 1, in heads 0 and 3."""
    positions = torch.arange(len(rows))
    near = (positions[:, None] - positions).abs() <= 1
    seen = keys | near | ~rows[:, None]
    seen[:, :, [1, 2, 4, 5]] = True
    return hide(model, ~seen, real, rows)


def check_against_loop(model, prompts, intervention, rule, edit=hide, **settings) -> None:
    """Compare patterns and logits of a run with plain torch under the keys chosen by the loop, step by step."""
    watched = watch(model, prompts, [intervention], ["hook_pattern", "hook_logits"], **settings)
    run, taken, steps = watched.run, dict[int, Tensor](), rule.get("steps")
    how = {name: value for name, value in rule.items() if name != "steps"}

    def edits(step):
        ids, real = entered(run, step)
        length, causal = ids.shape[1], bool(run.model.config.is_causal)
        keys = torch.zeros(3, len(ids), 6, length, length, dtype=torch.bool)
        rows = torch.zeros(length, dtype=torch.bool)
        for earlier, found in taken.items():
            # a pass without a cache recomputes the queries that decoded earlier tokens
            own = [run.prompt_length - 1 + earlier] if causal else slice(None) if earlier == step else []
            keys[:, :, :, own] = torch.nn.functional.pad(found, (0, length - found.shape[-1]))[:, :, :, None]
            rows[own] = True
        return edit(model, keys, real, rows)

    for step, plain in compared(watched, edits):
        sums = stacked(plain, "hook_pattern").sum(-1)[:, entered(run, step)[1][:, None].expand(-1, 6, -1)]
        torch.testing.assert_close(sums, torch.ones_like(sums))
        if steps is None or step + 1 in steps:
            taken[step + 1] = sinks_by_loop(stacked(plain, "hook_pattern"), run, step, **how)
    assert sum(int(keys.sum()) for keys in taken.values()) > 0
    assert run.steps_run > 1


SOME = {"heads": [1, 4], "layers": [0, 2]}
ACTIONS = {
    "mask": (MaskSinks(top_k=2), {}, hide),
    "keep": (KeepKeys(top_k=2, window=1, heads=[0, 3]), {"heads": (0, 3)}, keep),
    "mean values": (AblateValues(top_k=2), {}, lambda *given: replaced(*given[:3], "mean")),
    "no values": (AblateValues(top_k=2, by="zero"), {}, lambda *given: replaced(*given[:3], "zero")),
    "some values": (AblateValues(top_k=2, **SOME), SOME, lambda *given: replaced(*given[:3], "mean", [0, 2])),
}


@pytest.mark.fast_cases(9)
@pytest.mark.parametrize(
    ("architecture", "causal", "cached", "action"),
    [(*way, action) for way in WAYS for action in ACTIONS if action != "some values" or way[0] == "llama"],
)
def test_the_keys_chosen_by_a_loop_are_treated_as_in_plain_torch(worded, architecture, causal, cached, action):
    hooks, rule, edit = ACTIONS[action]
    check_against_loop(worded(architecture, causal), PADDED, hooks, {"top_k": 2} | rule, edit, **cache_of(cached))


OPTIONS = {
    "some layers": ({"layers": [-1, 0]}, {"layers": (0, 2)}),
    "some heads": ({"heads": [-2, 0]}, {"heads": (0, 4)}),
    "some steps": ({"steps": [1, -1]}, {"steps": (1, 3)}),
    "some positions": ({"positions": [0, 2, -1, -7], "top_k": 3}, {"positions": (0, 2, -1, -7), "top_k": 3}),
    "the weakest": ({"pick": "weakest", "top_k": 3}, {"weakest": True, "top_k": 3}),
    "the prompt": ({"only": "prompt", "top_k": 2}, {"only": "prompt", "top_k": 2}),
    "masks": ({"only": ["masked"], "top_k": 2}, {"only": "masked", "top_k": 2}),
    "what is committed": ({"only": "committed", "top_k": 2}, {"only": "committed", "top_k": 2}),
    "the paper's sinks": ({"top_k": None, "detector": EpsilonOverMean(epsilon=0.7)}, {"epsilon": 0.7}),
    "the prompt's among the paper's sinks": (
        {"top_k": None, "detector": EpsilonOverMean(epsilon=0.3), "only": "prompt", "positions": [0, 1, 3, 5, -1]},
        {"epsilon": 0.3, "only": "prompt", "positions": (0, 1, 3, 5, -1)},
    ),
    "a detector's three": ({"top_k": None, "detector": TopK(3)}, {"top_k": 3}),
    "as many of the weakest": (
        {"top_k": None, "detector": TopK(2), "pick": "weakest"},
        {"top_k": 2, "weakest": True},
    ),
}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("architecture", "causal", "cached", "option"),
    [(*way, option) for way in ONE_OF_EACH for option in OPTIONS if not (way[1] and option == "masks")],
)
def test_every_option_masks_the_keys_chosen_by_a_naive_loop(worded, architecture, causal, cached, option):
    given, rule = OPTIONS[option]
    if causal and "steps" in rule:
        rule = {"steps": (1, 4)}
    check_against_loop(worded(architecture, causal), PADDED, MaskSinks(**given), rule, **cache_of(cached))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "found_nothing",
    [
        MaskSinks(top_k=0),
        MaskSinks(top_k=None, detector=EpsilonOverMean(epsilon=1000)),
        MaskSinks(top_k=None, detector=EpsilonOverMean(epsilon=1000), pick="random_any"),
        KeepKeys(top_k=0, window=50),
        MaskKeys(keep=True, window=50, positions=[0]),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("architecture", "causal", "cached"), ONE_OF_EACH)
def test_a_run_without_masked_keys_is_the_base_run_bit_for_bit(worded, architecture, causal, cached, found_nothing):
    model, settings = worded(architecture, causal), {"points": ["hook_logits"], "record_sinks": True} | cache_of(cached)
    base, changed = watch(model, PADDED, **settings), watch(model, PADDED, [found_nothing], **settings)
    assert same(changed, base)
    assert changed.run.sinks.data["score"].equals(base.run.sinks.data["score"])


@pytest.mark.parametrize("prompts", [LONG, PADDED], ids=["long", "padded"])
@pytest.mark.parametrize("given", [
    {}, {"layers": [0, 2]}, {"heads": [1]}, {"steps": [1, 3]}, {"positions": range(2, 6)}, {"where": "prompt"},
    {"pick": "random"}, {"top_k": None, "detector": EpsilonOverMean(epsilon=2)},
])  # fmt: skip
def test_the_masks_of_all_layers_at_once_are_those_of_each(model, monkeypatch, given, prompts):
    """And recording is the same on the short path of attention and on the long one, with masks and without."""
    run = partial(sinklens.generate, model, prompts, gen_length=5, progress=False)
    at_once, plain = run(hooks=MaskSinks(**given)), run()
    monkeypatch.setattr(Hide, "of_layers", lambda *_: None)
    monkeypatch.setattr(attention, "_short", lambda *_: None)
    for found, expected in ((at_once, run(hooks=MaskSinks(**given))), (plain, run())):
        assert torch.equal(found.canvas, expected.canvas)
        xr.testing.assert_identical(found.sinks.data, expected.sinks.data)
    assert not at_once.sinks.data.score.equals(plain.sinks.data.score)


def test_a_mask_is_made_once_for_all_layers_where_nothing_else_takes_part(model, monkeypatch):
    """Beside another function at a mask, it is called in every layer."""
    called, one = [], Hide.__call__
    monkeypatch.setattr(Hide, "__call__", lambda self, value, hook: called.append(hook.step) or one(self, value, hook))
    sinklens.generate(model, PADDED, hooks=MaskSinks(2), gen_length=5, progress=False)
    assert not called
    other = [("blocks.1.attn.hook_attn_mask", lambda value, hook: None)]
    run = sinklens.generate(model, PADDED, hooks=[MaskSinks(2), *other], gen_length=5, progress=False)
    assert set(called) == set(range(run.steps_run))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("architecture", "causal", "cached"), WAYS)
def test_a_query_with_no_key_left_has_an_all_zero_row_and_logits_stay_finite(model, architecture, causal, cached):
    """Mask all keys of the previous step: every key in a diffusion run, all but the new token in an autoregressive."""
    length = len(LONG.split()) + (0 if causal else 8) + (architecture == "sdar")  # which completes its last block
    points = ["hook_pattern", "hook_logits"]
    watched = watch(model, [LONG], [MaskSinks(top_k=length, steps=[1])], points, **cache_of(cached))
    pattern = watched.stacked("hook_pattern", 1)
    if causal:
        assert (pattern[..., -1, :-1] == 0).all()
        assert (pattern[..., -1, -1] == 1).all()
    else:
        assert (pattern == 0).all()
    assert torch.isfinite(logits_of(watched)).all()
    assert not torch.equal(
        logits_of(watched)[:, 1], logits_of(watch(model, [LONG], [], points, **cache_of(cached)))[:, 1]
    )


WINDOWS = [
    {"window": 0, "positions": [0, -1]},
    {"window": 2, "positions": [2], "heads": [0, 4]},
]


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(
    ("architecture", "causal", "cached", "given"),
    [(*way, given) for way in (WAYS[0], WAYS[-1]) for given in WINDOWS]
    + [(*way, WINDOWS[number % 2]) for number, way in enumerate(WAYS[1:-1])],
)
def test_a_window_equals_the_mask_written_by_a_loop(model, cached, given):
    window = MaskKeys(keep=True, **given, queries="each", layers=[0, -1])
    watched = watch(model, PADDED, [window], ["hook_pattern", "hook_logits"], **cache_of(cached))

    def edits(step):
        length = entered(watched.run, step)[0].shape[1]
        bias = torch.zeros(2, 6, length, length)
        for row, head in product(range(2), given.get("heads", range(6))):
            start, end = 3 * (row == 0), watched.run.canvas.shape[2]
            always = {start + place if place >= 0 else end + place for place in given["positions"]}
            for query, key in product(range(length), range(length)):
                if abs(query - key) > given["window"] and key not in always:
                    bias[row, head, query, key] = -torch.inf
        return {f"blocks.{layer}.attn.hook_attn_mask": add(bias) for layer in (0, 2)}

    assert len(list(compared(watched, edits))) > 1


def test_queries_all_masks_the_keys_of_the_newest_token_for_every_query(tiny_llama):
    """At each step, for every row of every head: the strongest key of the last row of the previous step."""
    patterns = []
    keep = [(f"blocks.{layer}.attn.hook_pattern", lambda value, hook: patterns.append(value)) for layer in range(4)]
    run = sinklens.generate(
        tiny_llama, PROMPT, hooks=[MaskSinks(queries="all"), *keep], use_cache=False, gen_length=5, progress=False
    )
    assert run.steps_run == 5
    for step in range(1, 5):
        for layer in range(4):
            before, now = patterns[4 * (step - 1) + layer][0], patterns[4 * step + layer][0]
            for head, key in enumerate(before[:, -1].argmax(-1).tolist()):
                assert not now[head, :, key].any()
                seen = now[head].sum(-1)
                torch.testing.assert_close(seen[1:], torch.ones_like(seen[1:]))
                assert float(seen[0]) == pytest.approx(0.0 if key == 0 else 1.0)  # the first query sees one key


@pytest.mark.parametrize("unit", ["visible", "fraction"])
def test_the_attention_of_the_newest_query_is_the_same_in_every_unit(tiny_llama, unit):
    """Keys with a fifth of the newest token's attention more than the mean of the others, from the patterns."""
    masking = MaskSinks(top_k=None, detector=EpsilonOverMean(epsilon=0.2, unit=unit))
    watched = watch(tiny_llama, PROMPT, [masking], ["hook_pattern", "hook_attn_mask"], gen_length=6)
    count = 0
    for step in range(1, watched.run.steps_run):
        before = watched.stacked("hook_pattern", step - 1)[:, 0, :, -1]
        others = (before.sum(-1, keepdim=True) - before) / (before.shape[-1] - 1)
        masked = watched.stacked("hook_attn_mask", step)[:, 0, :, -1] == -torch.inf
        assert torch.equal(masked[..., :-1], before > others + 0.2)
        count += int(masked.sum())
    assert count > 10


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("by", ["mean", "zero"])
@pytest.mark.parametrize(
    ("architecture", "causal", "settings"),
    [(*kind, cache_of(cached)) for *kind, cached in [*ONE_OF_EACH, WAYS[-1]]]
    + [("sdar", False, {}), ("sdar", False, {"use_cache": True})],
)
def test_values_at_places_equal_those_of_a_loop_for_the_queries_of_each_step(model, architecture, causal, settings, by):
    """With cached blocks the places are constant, because the keys of finished blocks keep theirs."""
    base = watch(model, PADDED, [], [], **settings).run
    shape = (2, base.settings.steps, 3, 6, base.real.shape[1])
    marked = torch.from_numpy(np.random.default_rng(5).random(shape) < 0.3) & base.real[:, None, None, None]
    marked = marked[:, :1].expand(shape) if architecture == "sdar" else marked
    watched = watch(model, PADDED, [AblateValues(where=marked, by=by)], ["hook_z"], **settings)

    def edits(step):
        real = entered(watched.run, step)[1]
        length, own = real.shape[1], torch.arange(real.shape[1]) - base.prompt_length + 1
        own = own.clamp(min=0) if causal else torch.full((length,), step)
        keys = marked[:, own][..., :length].permute(2, 0, 3, 1, 4)  # [layer, batch, head, query, key]
        return replaced(model, keys, real, by, range(3))

    assert len(list(compared(watched, edits))) > 1


EMPTY = [
    (MaskSinks, "steps", []),
    (KeepKeys, "layers", ()),
    (KeepKeys, "heads", np.array([], dtype=int)),
    (AblateHeads, "positions", range(0)),
]
REFUSED = [
    *(
        (lambda worded, make=make, given={name: empty}: make(**given), rf"{name} is empty, so \w+ would change nothing")
        for make, name, empty in EMPTY
    ),
    *(
        (lambda worded, make=make: make(steps=[0]), r"the previous step, so steps=\[0\] alone has no effect")
        for make in (MaskSinks, KeepKeys)
    ),
    (lambda worded: AblateValues(top_k=1, by="median"), "by must be one of mean, zero, resample; got 'median'"),
    (
        lambda worded: AblateValues(top_k=1).hooks_for(worded()),
        "ReplaceValues finds its places in a run, which a single pass is not",
    ),
    (lambda worded: KeepKeys(window="2"), r"window must be an integer of at least 0.*; got"),
    (
        lambda worded: watch(worded(), PADDED, [MaskSinks(top_k=15)]),  # as many as the longest row has
        "top_k = 15, but at step 1 a row has only 12 positions",
    ),
    (
        lambda worded: watch(worded("llama", True), PADDED, [KeepKeys(top_k=8)]),
        "top_k = 8, but at step 1 a row has only 4 positions",
    ),
    (
        lambda worded: watch(worded("llama", True), PADDED, [MaskSinks(queries="all")]),
        r"queries='all' changes what earlier tokens computed.* use_cache=False",
    ),
]


@pytest.mark.usefixtures("unchecked", "model")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_settings_without_a_meaning_are_rejected(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded)
