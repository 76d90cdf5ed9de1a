"""Rules that combine, rules and interventions of one's own, and the places that a run records, against loops."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from building import shared_model
from watching import PADDED, logits_of, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import effect, sweep
from sinklens.interventions import (
    AblateHeads,
    AblateMLPs,
    AtPositions,
    ForceTokens,
    MaskSinks,
    OfKind,
    Rule,
    Steer,
    Where,
)
from sinklens.interventions.places import follows_run
from sinklens.interventions.rules import InArray, Positions
from sinklens.sinks import EpsilonOverMean, TopK
from sinklens.sinks.kinds import enrichment
from sinklens.sinks.motion import motion_table
from sinklens.tasks import held_out

WAYS = [("llama", False, {}), ("llama", True, {}), ("llama", True, {"use_cache": False})]


def chosen_in(model, where, intervention=AblateHeads, **settings):
    """The places of `where` in a run, [batch, step, layer, head, pos]; and the run."""
    run = watch(model, PADDED, [intervention(where=where)], [], record_sinks=True, **settings).run
    (choice,) = run.chosen
    steps = choice.places.isel(step=slice(run.steps_run)).to_numpy()
    return np.broadcast_to(steps, (len(run.real), run.steps_run, 3, 6, run.real.shape[1])), run


def strongest(run, number):
    """The strongest keys of the step before, [batch, step, layer, head, pos]; nowhere at step 0."""
    scores = run.sinks.scores().fillna(-1.0).to_numpy()
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :number]
    found = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(found, order, True, axis=-1)
    return np.concatenate([np.zeros_like(found[:, :1]), found[:, :-1]], axis=1)


def states(run):
    """Whether each position is undecided, and whether it is in the prompt; [batch, step, 1, 1, pos]."""
    undecided = run.undecided[:, :-1].numpy()[:, :, None, None]
    return undecided, np.broadcast_to(np.arange(run.real.shape[1]) < run.prompt_length, undecided.shape)


TWO = Where(top_k=2)
COMBINED = {
    "and": (TWO & "prompt", lambda top, masked, prompt: top & prompt),
    "or": (TWO | OfKind("masked"), lambda top, masked, prompt: top | masked),
    "not": (~OfKind("masked"), lambda top, masked, prompt: ~masked & (top | True)),
    "not the strongest": (~TWO & OfKind("prompt"), lambda top, masked, prompt: ~top & prompt),
    "a text first": ("prompt" & TWO, lambda top, masked, prompt: top & prompt),
    "nested": (~(TWO | "prompt") | (TWO & "masked"), lambda top, masked, prompt: (~(top | prompt)) | (top & masked)),
    "positions": (
        OfKind("prompt") & ~Positions([0]),
        lambda top, masked, prompt: prompt & ~(np.arange(15) == np.array([3, 0])[:, None])[:, None, None, None],
    ),
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", COMBINED)
def test_combined_rules_are_at_the_places_of_a_loop_over_the_parts(worded, name):
    rule, expected = COMBINED[name]
    found, run = chosen_in(worded(), rule)
    wanted = expected(strongest(run, 2), *states(run)) & run.real.numpy()[:, None, None, None]
    by_scores = name not in ("not", "positions")
    first = 1 if by_scores else 0  # without scores, a rule and its complement are nowhere
    np.testing.assert_array_equal(found[:, first:], np.broadcast_to(wanted, found.shape)[:, first:])
    if by_scores and name != "or":
        assert not found[:, 0].any()
    assert found.any()
    assert not found.all()


@dataclass(frozen=True)
class EveryThird(Rule):
    """Every third position of the canvas, from the step's number on."""

    def at(self, now):
        return (torch.arange(now.canvas.ids.shape[1]) % 3 == now.step % 3)[None, None, None]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_a_combination_or_a_rule_of_ones_own_equals_the_array_that_it_stands_for(model, settings):
    base = watch(model, PADDED, points=[], **settings).run
    steps, length, real = base.settings.steps, base.real.shape[1], base.real[:, None, None, None]
    marked = (torch.rand(2, steps, 3, 6, length, generator=torch.manual_seed(1)) < 0.5) & real
    prompt, thirds = torch.arange(length) < base.prompt_length, torch.arange(length) % 3
    plain = logits_of(watch(model, PADDED, [], ["hook_logits"], **settings))
    for rule, array in (
        (InArray(marked) & "prompt", marked & prompt),
        (~(InArray(marked) | "prompt"), ~(marked | prompt) & real),
        (marked.numpy() & OfKind("prompt"), marked & prompt),
        (EveryThird(), (thirds == torch.arange(steps)[:, None] % 3)[None, :, None, None] & real),
    ):
        one, other = (
            watch(model, PADDED, [AblateHeads(where=where)], ["hook_logits"], **settings) for where in (rule, array)
        )
        assert torch.equal(logits_of(one), logits_of(other))
        assert not torch.equal(logits_of(one), plain)


@dataclass(frozen=True, kw_only=True)
class Louder(AtPositions):
    """An edit at a point without heads; another without an edit."""

    acts_on = "hook_mlp_out"

    def edit(self, value, hook):
        return 2 * value


@dataclass(frozen=True, kw_only=True)
class Nothing(AtPositions):
    acts_on = "attn.hook_z"


IDS = torch.tensor([[3, 4, 5]])
REFUSED = [
    (
        lambda model: watch(model, IDS, [AblateHeads(where=Where(top_k=2, pick="random") & "prompt")]),
        r"Where\(pick='random'\) draws as many keys as there are sinks, and & would",
    ),
    (lambda model: Where(top_k=1, of=(2,)), r"of must be a pair \(layer, head\) or None; got \(2,\)"),
    (lambda model: ForceTokens([3]), r"tokens must be a dict of positions and token ids, such as .*; got \[3\]"),
    (lambda model: Steer([1.0]), r"direction must be a tensor \[\*layer, d_model\] or a Directions; got \[1\.0\]"),
    (lambda model: Where(top_k=1) and OfKind("digit"), r"combine rules with &, \| and ~"),
    (
        lambda model: Louder(heads=[1]).hooks_for(model),
        r"blocks\.0\.hook_mlp_out has no head axis .*; omit heads=",
    ),
    (
        lambda model: model.run_with_hooks(IDS, fwd_hooks=Nothing().hooks_for(model)),
        r"Nothing must define edit\(self, value, hook\), or pairs",
    ),
    (
        lambda model: watch(model, IDS, [AblateHeads(where=Rule())]),
        r"Rule is a Rule and must define at\(self, now\)",
    ),
    (lambda model: OfKind("digit") & 3, r"where must be a detector, a Where, .* got 3"),
    (lambda model: 3 | OfKind("digit"), r"where must be a detector, a Where, .* got 3"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_rules_and_interventions_without_a_meaning_are_refused(call, text):
    with pytest.raises((SettingError, NotImplementedError), match=text):
        call(shared_model())


def test_whether_places_follow_the_run_is_known_of_every_rule():
    follows = [TopK(1), Where(top_k=1), EveryThird(), ~TWO, OfKind("digit") | TWO]
    others = ["digit", OfKind("digit"), ~OfKind("digit"), Positions([1]), torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)]
    assert all(map(follows_run, [MaskSinks(), *(AblateHeads(where=where) for where in follows)]))
    assert not any(follows_run(AblateHeads(where=where)) for where in (*others, None, Where(top_k=1, same_step=True)))
    assert not follows_run(MaskSinks(top_k=None, where="digit"))


@pytest.mark.extended
def test_keys_do_not_depend_on_how_long_a_row_waits_for_others(tiny_llada):
    """Rows finish their blocks at different steps; a waiting row keeps the scores of its own last step."""
    prompts = [problem.prompt for problem in held_out(6)]
    settings = {"gen_length": 32, "block_length": 8, "threshold": 0.9, "record_sinks": False, "progress": False}
    together = sinklens.generate(tiny_llada, prompts, hooks=MaskSinks(top_k=2), **settings)
    waits = 0
    for row, prompt in enumerate(prompts):
        alone = sinklens.generate(tiny_llada, [prompt], hooks=MaskSinks(top_k=2), **settings)
        assert torch.equal(*[run.tokens[at, run.prompt_length :] for run, at in ((alone, 0), (together, row))])
        waits += together.steps_run - alone.steps_run
    assert waits > 10


SHORT, LONG = (
    f"Question: {question}\nAnswer:"
    for question in ("Ben has 9 eggs.", "Tom has 5 apples. He buys 7 more. How many apples does Tom have now?")
)


@pytest.mark.parametrize(("name", "prompts", "given"), [
    ("tiny-llama", (SHORT, LONG), {}), ("tiny-sdar", (LONG, SHORT), {}),
    ("tiny-llada", (SHORT, LONG), {"stop_at_eos": True, "block_length": 8, "gen_length": 32}),
])  # fmt: skip
def test_steps_at_which_the_last_row_waits_count_for_nothing(name, prompts, given):
    model, found = sinklens.load(name), []
    for batch in (prompts, prompts[1:]):
        base = sinklens.generate(model, list(batch), progress=False, **given)
        control = MaskSinks(2, source=base, same_step=True, pick="random")
        changed = effect(model, list(batch), control, **given)
        found.append([
            base.steps_run, changed.free.control_keys.picked[-1].item(), control.keys(changed.free)[-1].sum().item(),
            *enrichment(base.sinks).sinks[-1].to_numpy(), *motion_table(base.sinks).iloc[-1],
            changed.under_replay.kl[-1].mean().item(),
            sweep(model, list(batch), {"same": control}, metric=lambda output: output.undecided.any(-1), replay=True,
                  **given)["metric"][0, -1].count().item(),
        ])  # fmt: skip
    assert found[0][0] > found[1][0]
    assert found[0][1:] == pytest.approx(found[1][1:], rel=1e-4, nan_ok=True)


# --- what a run records ---


CHOICES = {
    "the strongest": MaskSinks(top_k=2, layers=[0, 2], heads=[1, 5]),
    "random keys": MaskSinks(top_k=2, pick="random", seed=3),
    "keys of a kind": MaskSinks(top_k=3, only="prompt"),
    "a detector's": MaskSinks(top_k=None, detector=EpsilonOverMean(epsilon=0.5)),
    "at places": MaskSinks(top_k=None, where=Where(top_k=2) & "prompt", layers=[1]),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("llama", True)])
def test_a_run_records_the_keys_that_got_no_attention(worded, architecture, causal, name):
    masking = CHOICES[name]
    watched = watch(worded(architecture, causal), PADDED, [masking], ["hook_attn_mask"], record_sinks=True)
    run = watched.run
    keys, count = masking.keys(run).to_numpy(), 0
    for step in range(run.steps_run):
        mask = watched.stacked("hook_attn_mask", step)[..., -1, :]  # [layer, batch, head, key]
        hidden = (
            (mask == -torch.inf).transpose(0, 1)
            & run.real[:, None, None, : mask.shape[-1]]
            & run.active[:, step, None, None, None]
        ).numpy()
        np.testing.assert_array_equal(keys[:, step][..., : mask.shape[-1]], hidden)
        count += hidden.sum()
    assert count > 10


def test_runs_without_a_record_are_rejected(model):
    recorded = watch(model, PADDED, [MaskSinks(top_k=1)], [], record_sinks=True).run
    plain = watch(model, PADDED, [MaskSinks(top_k=2), AblateMLPs(layers=[0])], []).run
    assert plain.chosen == ()
    assert watch(model, PADDED, [AblateMLPs(layers=[0])], [], record_sinks=True).run.chosen == ()
    for run in (recorded, plain):
        with pytest.raises(SettingError, match="the run did not record the keys of this intervention; list it in"):
            MaskSinks(top_k=2).keys(run)
