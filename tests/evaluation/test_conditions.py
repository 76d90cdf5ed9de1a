"""Conditions: those of the study, their controls, and which ones are refused."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

import sinklens
from sinklens.errors import HookNameError, SettingError
from sinklens.evaluation import UNMASKED, Condition, masking, under_caches
from sinklens.evaluation.conditions import CONTROLS
from sinklens.interventions import Intervention, MaskSinks
from sinklens.sampling import DelayedCache, DualCache, KeepSinks, NoCache, Policy, Refresh
from sinklens.tasks import held_out


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"counts": [10, 1, 1]}, ["1 sink", "10 sinks"]),
        ({"counts": [0]}, []),
        ({"counts": [1], "queries": "all"}, ["1 sink, for all queries"]),
        ({"counts": [5], "controls": ["same_mass"]}, ["5 sinks", "5 random keys of the same mass"]),
        ({"counts": [5], "controls": ["weakest", "random"], "seed": 7},
         ["5 sinks", "5 random keys, seed 7", "5 weakest keys"]),
        ({"counts": [2], "of_unmasked": True}, ["2 sinks", "2 sinks of the unmasked run"]),
        ({"counts": [2], "sinks_only": True}, ["2 sinks", "2 sinks, only by Eq. 3"]),
    ],
)  # fmt: skip
def test_the_unmasked_model_is_always_included_and_names_state_the_settings(given, names):
    unmasked, *found = masking(**given)
    assert (unmasked, [condition.name for condition in found]) == (UNMASKED, names)


def test_random_controls_last_and_leave_out_the_strongest_unless_any_key_is_requested():
    found = {condition.pick: condition for condition in masking([1], list(CONTROLS), of_unmasked=True, seed=4)}
    assert list(found) == ["", "strongest", "steady", *CONTROLS]
    for control in ("random", "same_mass", "same_kind"):
        (hook,) = found[control].hooks
        assert (hook.where.persistent, hook.where.seed) == (True, 4)
        assert hook.where.pick == control
    assert masking([1], ["same_mass"])[-1].of_unmasked
    assert found["random_any"].hooks == (MaskSinks(pick="random_any", seed=4),)
    of_unmasked = [name for name, condition in found.items() if condition.of_unmasked]
    assert of_unmasked == ["steady", "random", "same_mass", "same_kind", "nearest"]
    assert found["weakest"].hooks[0].where.seed == 0  # it draws nothing


def test_sinks_of_the_unmasked_run_are_a_separate_condition(tiny_llada):
    _, in_run, steady = masking([2], of_unmasked=True)
    assert ((steady.masked, steady.pick), steady.hooks) == ((2, "steady"), in_run.hooks)
    assert steady.described() != in_run.described() | {"name": steady.name, "pick": "steady"}
    run = sinklens.generate(tiny_llada, "Question: 2 + 3?\nAnswer:", steps=2, progress=False)
    assert steady.hooks_for(lambda: run.sinks) == [MaskSinks(top_k=2, source=run.sinks)]
    assert in_run.hooks_for(lambda: pytest.fail("an unmasked run is not needed")) == list(in_run.hooks)


def test_a_head_without_a_sink_loses_nothing_if_only_sinks_are_masked(tiny_llada, tiny_llama):
    (only,), prompt = masking([2], sinks_only=True)[2].hooks, held_out(1)[0].prompt
    for model in (tiny_llada, tiny_llama):
        run = sinklens.generate(model, prompt, hooks=only, gen_length=6, progress=False)
        keys, sinks = only.keys(run).sum("pos")[:, 1:], run.sinks.detect().sum("pos")[:, :-1].clip(max=2)
        assert set(np.unique(keys)) == {0, 1, 2}
        assert model.causal or (keys.to_numpy() == sinks.to_numpy()).all()


def test_plain_interventions_and_policies_are_described_by_their_repr():
    """So do ledgers of earlier versions describe them."""
    conditions = masking([1, 5], list(CONTROLS), of_unmasked=True, seed=3)
    for one in under_caches(conditions, ["dual", "delayed", "keep-sinks:4", "drop-sinks:4", Refresh(every=4)]):
        assert one.described()["hooks"] == [repr(hook) for hook in one.hooks]
        assert one.described().get("cache") == (None if one.cache is None else repr(one.cache))
        assert "code" not in one.described()
    assert UNMASKED.described() == {"name": "unmasked", "hooks": [], "masked": 0, "pick": ""}


@dataclass(frozen=True)
class HiddenState(Intervention):
    """A dataclass with state outside its fields."""

    factor: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.factor)

    def pairs(self, model, run):
        return []


@dataclass(frozen=True)
class Blocks(Policy):
    """A policy from outside sinklens, whose repr omits a setting."""

    share: float = field(default=0.1, repr=False)

    def plan(self, history):
        return history.in_block


class Unsettled(Policy):
    """Its setting is not a field, so its repr does not contain it."""

    def plan(self, history):
        return history.in_block


@pytest.mark.parametrize(
    "given",
    [
        {"cache": Blocks()},
        {"cache": Refresh(every=4, within=Blocks())},
    ],
    ids=str,
)
def test_a_description_includes_the_code_of_what_is_from_outside(given):
    assert len(Condition("mine", **given).described()["code"]) == 1


def test_settings_that_a_repr_omits_are_described():
    assert "share=0.2" in Condition("mine", cache=Blocks(0.2)).described()["cache"]


REFUSED = [
    (partial(masking, [-1]), SettingError, r"0 or more; got -1"),
    (
        partial(masking, [1], ["neerest"]),
        SettingError,
        r"a control is one of random, .*, nearest; got 'neerest'. Nearest: nearest",
    ),
    (partial(masking, 1.5), SettingError, r"counts must be a list of integers, such as .*; got 1.5"),
    (partial(masking, ["1"]), SettingError, r"counts must be a list of integers, .*; got \['1'\]"),
    (partial(Condition, "a", control_of="a"), SettingError, "'a' cannot be a control of itself"),
    (
        partial(Condition, "a", [("hook_embed", print)]),
        SettingError,
        "the hooks of a condition are interventions, .*; got",
    ),
    (partial(Condition, "a", 3), HookNameError, "hooks= must be a list of"),
    (
        partial(Condition, "mine", (HiddenState(),)),
        SettingError,
        "HiddenState keeps doubled outside dataclass fields",
    ),
    *(
        (partial(Condition, "mine", cache=policy), SettingError, r"cannot fingerprint .*Unsettled object at")
        for policy in (Unsettled(), Refresh(every=4, within=Unsettled()))
    ),
    (
        partial(under_caches, [Condition("a", cache=DualCache())], ["prefix"]),
        SettingError,
        r"the condition 'a' has a cache policy already; drop cache=",
    ),
    (
        partial(under_caches, [UNMASKED], ["keep-sink:4"]),
        SettingError,
        r"no cache policy is called 'keep-sink'; known: none, .* Nearest: keep-sinks",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_cannot_be_set_or_recorded_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.usefixtures("unchecked")
def test_one_intervention_may_stand_for_a_list_and_a_control_is_part_of_the_description():
    one = Condition("a", MaskSinks(top_k=1))
    assert one == Condition("a", [MaskSinks(top_k=1)])
    assert "control_of" not in one.described()
    assert replace(one, control_of="b").described() == one.described() | {"control_of": "b"}


def test_every_condition_is_exact_and_under_each_cache_policy():
    found = under_caches(masking([1]), ["dual", "none", KeepSinks(k=4), Refresh(every=2), DelayedCache(4)])
    assert [(one.name, one.cache) for one in found[:4]] == [
        ("unmasked", None), ("1 sink", None), ("cache dual", DualCache()), ("1 sink, cache dual", DualCache()),
    ]  # fmt: skip
    assert [one.name for one in found[4::2]] == ["cache keep-sinks:4", "cache refresh:2", "cache delayed:4"]
    assert found[3].hooks == found[1].hooks
    assert under_caches([UNMASKED], "dual") == [UNMASKED, Condition("cache dual", masked=0, cache=DualCache())]
    assert under_caches(UNMASKED, NoCache()) == [UNMASKED]
