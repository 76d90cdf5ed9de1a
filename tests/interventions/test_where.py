"""Places that follow the run: every form of `where=` against loops, in every kind of run, and errors for others."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xarray as xr
from watching import PADDED, Z, compared, entered, stacked, watch

from sinklens.errors import SettingError
from sinklens.interventions import (
    AblateHeads,
    Activations,
    AtPositions,
    FreezePattern,
    MaskSinks,
    PatchHooks,
    Remask,
    Where,
)
from sinklens.sinks import EpsilonOverMean, StrongestKeys, TopK

WAYS = [("llama", False, {}), ("dream", False, {}), ("sdar", False, {}), ("qwen3", True, {}),
        ("qwen3", True, {"use_cache": False})]  # fmt: skip
FORMS = ["array", "state", "positions and an array", "detector", "of one head"]


def random_places(run):
    """A random array [2, step, 3, 6, pos], False on padding."""
    marked = np.random.default_rng(3).random((2, run.settings.steps, 3, 6, run.real.shape[1])) < 0.4
    return torch.from_numpy(marked) & run.real[:, None, None, None]


def given(form, marked):
    """`where=` and other arguments of a form."""
    return {
        "array": {"where": marked},
        "state": {"where": ("committed", "not prompt")},
        "detector": {"where": TopK(2)},
        "of one head": {"where": Where(top_k=3, of=(-1, 4))},
        "constant": {"where": marked[:, :1]},
        "positions and an array": {"where": marked.numpy(), "positions": [0, 3, -2]},
    }[form]


def places_of_step(form, marked, run, step, before):
    """The places of a step by hand, [layer, batch, head, pos]; `before` is the pattern of the step before."""
    (batch, length), causal = run.real.shape, bool(run.model.config.is_causal)
    columns, starts, now = torch.arange(length), run.real.long().argmax(dim=1)[:, None], marked[:, step].transpose(0, 1)
    undecided = (columns >= run.prompt_length + step).expand(batch, -1) if causal else run.undecided[:, step]
    listed = (columns == starts) | (columns == starts + 3) | (columns == length - 2)
    found = {
        "array": now,
        "constant": marked[:, 0].transpose(0, 1),
        "state": ((columns >= run.prompt_length) & ~undecided)[:, None],
        "positions and an array": now & listed[:, None],
    }.get(form, torch.zeros(length, dtype=torch.bool))
    found = (found & run.real[:, None]).expand(3, batch, 6, length).clone()
    if before is not None and form in ("detector", "of one head"):
        for layer, row, head in np.ndindex(3, batch, 6):
            source, keys = (layer, head) if form == "detector" else (2, 4), run.real[row].nonzero()[:, 0].tolist()
            sums = before[source[0], row, source[1], keys].double().sum(dim=0).tolist()
            best = sorted(keys, key=lambda key, sums=sums: -sums[key])[: 2 if form == "detector" else 3]
            found[layer, row, head, best] = True
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("architecture", "causal", "settings", "form"),
    [(*way, form) for way in (WAYS[0], WAYS[4]) for form in (FORMS if not way[1] else FORMS[:3])]
    + [
        (*way, form)
        for number, way in enumerate(WAYS[1:4])
        for form in FORMS[number % 2 :: 2]
        if not (way[1] and form in FORMS[3:])
    ]
    + [("sdar", False, {"use_cache": True}, "constant")],
)
def test_ablation_at_places_equals_an_edit_made_by_a_loop(model, causal, settings, form):
    """In an autoregressive run a query keeps the places of the step that owns it."""
    marked, kept = random_places(watch(model, PADDED, points=[], **settings).run), {}
    watched = watch(model, PADDED, [AblateHeads(**given(form, marked))], ["hook_z"], **settings)
    run, changed, before = watched.run, 0, None

    def edits(step):
        kept[step] = places_of_step(form, marked, run, step, before)
        own = (torch.arange(entered(run, step)[0].shape[1]) - run.prompt_length + 1).clamp(min=0)
        places = [kept[int(one) if causal else step][..., column] for column, one in enumerate(own)]
        places = torch.stack(places, dim=-1)
        return {
            f"blocks.{layer}.attn.hook_z": lambda z, at=at: z.masked_fill(at.transpose(1, 2)[..., None], 0.0)
            for layer, at in enumerate(places)
        }

    for step, plain in compared(watched, edits):
        before = stacked(plain, "hook_pattern")
        changed += int((watched.stacked("hook_z", step) == 0).all(dim=-1).sum())
    assert changed > 10


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["blocks.1.hook_resid_post", "blocks.2.attn.hook_v", "blocks.0.attn.hook_pattern"])
@pytest.mark.parametrize(
    ("architecture", "causal", "settings"), [WAYS[0], *WAYS[3:], ("sdar", False, {"use_cache": True})]
)
def test_a_patch_puts_the_sources_values_at_its_places_alone(model, causal, settings, name):
    """Three query heads share a key/value head, which is patched where any of them has a place."""
    kept = Activations(names=name)
    watch(model, ["w6 w2 w34 w9", "w9 w8 w7 w6 w5 w4 w3"], [kept], [], **settings)
    base = watch(model, PADDED, points=[], **settings).run
    marked, layer = random_places(base), int(name[7])
    watched = watch(model, PADDED, [PatchHooks(source=kept.caches, where=marked)], [name], replay=base, **settings)
    before = watch(model, PADDED, [], [name, "hook_z"], replay=base, **settings)
    for step in range(base.steps_run):
        old, new, source = (values[step][name] for values in (before.values, watched.values, kept.caches))
        axis = 2 if name.endswith("pattern") else 1
        first = before.ends[step] - new.shape[axis]
        for row, query in itertools.product(range(2), range(new.shape[axis])):
            own = max(0, first + query - base.prompt_length + 1) if causal else step
            heads = marked[row, own, layer, :, first + query]
            if own != step:  # recomputed in a pass without a cache
                continue
            heads = heads.view(2, 3).any(1) if name.endswith("hook_v") else heads
            for head, chosen in enumerate(heads.tolist() if "attn" in name else [bool(heads.any())]):
                at = (row, head, query) if axis == 2 else (row, query, head) if "attn" in name else (row, query)
                assert torch.equal(new[at], source[at] if chosen else old[at])


def one_hot(run, top_k=1):
    """The strongest keys of each step of a recorded run, as an array."""
    top = run.sinks.top(top_k).to_numpy()
    found = np.zeros((*top.shape[:4], run.real.shape[1]), dtype=bool)
    np.put_along_axis(found, np.maximum(top, 0), top >= 0, axis=-1)
    return found


def outputs(model, where, **settings):
    """The head outputs of a run in which the places of `where` are ablated, [step, layer, batch, pos, head, d_head]."""
    watched = watch(model, PADDED, [AblateHeads(where=where, layers=[0, 2])], ["hook_z"], **settings)
    return torch.stack([watched.stacked("hook_z", step) for step in range(watched.run.steps_run)])


def test_a_recorded_run_the_same_step_and_an_array_name_the_same_places(model):
    base = watch(model, PADDED, points=[], record_sinks=True).run
    by_array = outputs(model, one_hot(base), replay=base)
    for where in (
        Where(top_k=1, same_step=True),
        Where(top_k=1, source=base, same_step=True),
        StrongestKeys(k=1).detect(base.sinks),
    ):
        assert torch.equal(outputs(model, where, replay=base), by_array)
    earlier = np.roll(one_hot(base), 1, axis=1)
    earlier[:, 0] = False
    assert torch.equal(outputs(model, Where(top_k=1, source=base), replay=base), outputs(model, earlier, replay=base))
    detected = base.sinks.detect(EpsilonOverMean())
    assert torch.equal(outputs(model, base.sinks, replay=base), outputs(model, detected, replay=base))
    assert not torch.equal(outputs(model, base.sinks, replay=base), by_array)


def test_a_named_array_may_lack_axes_and_steps(model):
    marked = one_hot(watch(model, PADDED, points=[], record_sinks=True).run)
    named = xr.DataArray(marked, dims=("batch", "step", "layer", "head", "pos"), coords={"step": range(4)})
    assert torch.equal(outputs(model, named.sel(head=3)), outputs(model, marked[:, :, :, 3:4]))
    some = marked.copy()
    some[:, [0, 2]] = False
    assert torch.equal(outputs(model, named.sel(step=[3, 1])), outputs(model, some))
    one = np.zeros_like(marked)
    one[:, 2] = marked[:, 2]
    assert torch.equal(outputs(model, named.sel(step=[2])), outputs(model, one))
    assert torch.equal(outputs(model, named.sel(step=2)), outputs(model, one))
    every = named.sel(step=2).drop_vars("step")  # without the coordinate: the same places in all steps
    assert torch.equal(outputs(model, every), outputs(model, np.repeat(marked[:, 2:3], 4, axis=1)))


@dataclass(frozen=True, kw_only=True)
class Halved(AtPositions):
    """Half of the attention."""

    acts_on = "attn.hook_pattern"

    def edit(self, value, hook):
        return value / 2


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("kind", "causal"), [(FreezePattern(at=0), False), (Halved(), False), (Halved(), True)], ids=str
)
def test_queries_elsewhere_keep_their_attention(model, kind, causal):
    base = watch(model, PADDED)
    marked = random_places(base.run)
    limited = replace(kind, layers=[0], where=marked)
    fully, partly = (watch(model, PADDED, [hook], replay=base.run) for hook in (replace(kind, layers=[0]), limited))
    for step in range(base.run.steps_run):
        plain, new, all_new = (watched.stacked("hook_pattern", step)[0] for watched in (base, partly, fully))
        first = new.shape[-1] - new.shape[-2]
        own = [max(0, first + query - base.run.prompt_length + 1) if causal else step for query in range(new.shape[2])]
        here = torch.stack([marked[:, own[query], 0, :, first + query] for query in range(new.shape[2])], dim=-1)
        torch.testing.assert_close(new, torch.where(here[..., None], all_new, plain), atol=1e-6, rtol=0)
        assert step == 0 or not torch.allclose(new, plain, atol=1e-3)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("where", ["digit", "not digit", ("newline", "committed"), "decided"], ids=str)
def test_kinds_and_states_are_those_of_the_tokens_on_the_canvas(tiny_llada, where):
    """Read from the text of each token."""
    prompt = "Question: Ben has 9 eggs. He finds 4 more. How many eggs does Ben have now?\nAnswer:"
    ablate = AblateHeads(layers=[1], where=where)
    watched = watch(tiny_llada, prompt, [ablate], ["1.attn.hook_z"], gen_length=8, steps=8)
    run, found = watched.run, 0
    for step in range(8):
        texts = tiny_llada.to_str_tokens(run.canvas[0, step])
        undecided = run.canvas[0, step] == tiny_llada.mask_token_id
        for position, text in enumerate(texts):
            here = {
                "digit": not undecided[position] and text.strip().isdigit(),
                "not digit": not (not undecided[position] and text.strip().isdigit()),
                "decided": not undecided[position] and position >= run.prompt_length,
            }.get(where, "\n" in text or (not undecided[position] and position >= run.prompt_length))
            assert bool((watched.values[step][Z][0, position] == 0).all()) == bool(here)
            found += bool(here)
    assert found > 8


def test_a_single_pass_takes_an_array(model):
    ids = torch.tensor([[5, 6, 7, model.mask_token_id]])
    marked = torch.zeros(1, 1, 3, 1, 4, dtype=torch.bool)
    marked[0, 0, 1, 0, 2] = True
    plain = model.run_with_cache(ids)[1]
    ablate = AblateHeads(where=marked)
    seen = {}
    model.run_with_hooks(
        ids, fwd_hooks=[*ablate.hooks_for(model), (Z, lambda value, hook: seen.update(z=value.clone()))]
    )
    expected = plain[Z].clone()
    expected[:, 2] = 0
    torch.testing.assert_close(seen["z"], expected, atol=1e-5, rtol=0)


FALSE = torch.zeros(2, 4, 3, 6, 15, dtype=torch.bool)


CACHES = {0: {"hook_embed": torch.zeros(1, 15, 24)}}
REFUSED = [
    *(
        (lambda worded, where=where: watch(worded(), PADDED, [AblateHeads(where=where)]), text)
        for where, text in (
            (
                FALSE.int(),
                r"where must be boolean, True at the places, .*; got torch\.int32 of shape \[2, 4, 3, 6, 15\]",
            ),
            (FALSE[0], r"with the axes \[batch, step, layer, head, pos\].* of shape \[4, 3, 6, 15\]"),
            (FALSE[:, :3], "where has 3 along step, this run 4; give 1 or 4. A DataArray, such as track.detect"),
            (FALSE[..., :14], "where has 14 along pos, this run 15; give 1 or 15"),
            (~FALSE, "where marks position 0 of row 0, which is padding; positions of an array are columns of the"),
            (xr.DataArray(FALSE.numpy()[0, 0], dims=("layer", "heads", "pos")), "where has an axis 'heads'"),
            ("digits", "where= takes states or token kinds, .* 'digits' is neither. .* Nearest: digit"),
            (Where(top_k=1, of=(3, 0)), "layer 3 does not exist; there are 3"),
            (Where(top_k=1, of=(0, 6)), "head 6 does not exist; there are 6"),
            (TopK, "where must be a detector, a Where, .* got <class 'sinklens.sinks.detectors.TopK'>"),
            (3, "where must be a detector, a Where, .* got 3. Positions that never change are positions="),
            ([], r"where must be a detector, a Where, .* got \[\]"),
        )
    ),
    *(
        (
            lambda worded, where=where: AblateHeads(where=where).hooks_for(worded()),
            "Ablate finds its places in a run, which a single pass is not",
        )
        for where in ("digit", TopK(1))
    ),
    (
        lambda worded: watch(worded(), PADDED, [PatchHooks(source=CACHES, where=TopK(1))]),
        "where= finds positions for each layer, and hook_embed is in none",
    ),
    (
        lambda worded: watch(worded(), PADDED, [Remask(where=FALSE)]),
        r"for each layer, and denoise\.hook_canvas is in none",
    ),
    (
        lambda worded: watch(
            worded(), PADDED, [PatchHooks(source=CACHES, where="masked", positions=[1], source_positions=[2])]
        ),
        "source_positions= pairs with positions=, of the same length, and where= takes",
    ),
    (
        lambda worded: watch(worded("llama", True), PADDED, [AblateHeads(where="masked")]),
        "'masked': an autoregressive run has no masked positions",
    ),
    (
        lambda worded: watch(worded("llama", True), PADDED, [AblateHeads(where=TopK(1))]),
        r"finds keys in earlier text, .* so Ablate would change nothing",
    ),
    (
        lambda worded: MaskSinks(top_k=1, where="prompt"),
        "pass one of top_k, detector and where; got where and top_k.* With where=, the other settings belong in it",
    ),
    (
        lambda worded: worded().run_with_hooks(
            torch.tensor([[5, 6, 7]]), fwd_hooks=AblateHeads(where=FALSE[:1, :1, :, :1, :4]).hooks_for(worded())
        ),
        "where has 4 positions, and the pass 3; give one for each",
    ),
    (lambda worded: MaskSinks(topk=1), "there is no argument 'topk'.* Nearest: top_k"),
    (lambda worded: Where(), "pass either top_k, a number of keys per head, or detector; got top_k=None"),
]


@pytest.mark.usefixtures("unchecked", "model")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_places_that_do_not_exist_or_have_no_meaning_are_rejected(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded)
