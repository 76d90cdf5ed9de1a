"""Donors are positions alike in what is matched, found by hand among the labels of the runs that were collected."""

import pytest
import torch
from watching import LONG, PADDED, SHORT, entered, watch

from sinklens.errors import SettingError
from sinklens.experiments import difference_of_means, donors
from sinklens.interventions import AblateValues, Resample
from sinklens.sinks.kinds import Kind, PlaceState

WAYS = [("llama", False, {}), ("sdar", False, {}), ("sdar", False, {"use_cache": True}),
        ("llama", True, {}), ("llama", True, {"use_cache": False})]  # fmt: skip
Z, V = "blocks.1.attn.hook_z", "blocks.1.attn.hook_v"
OTHERS = ["w1 w2 w3 w4 w5 w6 w7", "w21 w22 w23 w24", "w30 w31 w32 w33 w34 w35 w36", "w40 w41 w42 w43"]


def labels_by_hand(run, row, column, step):
    """(step, state, position, kind) of a place."""
    causal, model = bool(run.model.config.is_causal), run.model
    token, answer = int(run.canvas[row, step, column]), column - run.prompt_length
    masked = not causal and token == model.mask_token_id
    start = int(run.real[row].long().argmax())
    state = PlaceState.MASKED if masked else PlaceState.COMMITTED if answer >= 0 else PlaceState.PROMPT
    special = {token: Kind[name.upper()] for name, ids in model.special_tokens.items() for token in ids}
    kind = Kind.MASK if masked else special.get(token, Kind.WORD)
    if kind == Kind.END and column == start and answer < 0:
        kind = Kind.START
    earlier = run.canvas[row, step, run.prompt_length : column].tolist()
    if kind == Kind.END and answer >= 0 and any(other in model.special_tokens["end"] for other in earlier):
        kind = Kind.FILLING
    own = max(0, answer + 1) if causal else step
    return own, int(state), answer if answer >= 0 else start - column - 1, int(kind)


def computed(watched):
    """Each real place that a step computes: step, row, column, and its value."""
    for step, values in watched.values.items():
        stop, count = watched.ends[step], values[Z].shape[1]
        for row, at in entered(watched.run, step)[1][:, stop - count : stop].nonzero().tolist():
            yield step, row, stop - count + at, values[Z][row, at]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_every_real_position_of_an_active_row_is_a_donor_with_its_labels(model, causal, settings):
    few = {"gen_length": 4} | settings
    found = donors(model, PADDED, [Z], **few)
    watched = watch(model, PADDED, [], ["1.attn.hook_z"], **few)
    wanted = []
    for step, row, column, value in computed(watched):
        label = labels_by_hand(watched.run, row, column, step)
        active = causal or bool(watched.run.undecided[row, step][watched.run.real[row]].any())
        if active and (not causal or label[0] == step):
            wanted.append((label, value))
    labels = torch.stack([found.step, found.state, found.position, found.kind], dim=1).tolist()
    assert sorted(map(tuple, labels)) == sorted(label for label, _ in wanted)
    for label, value in wanted[::7]:
        same = torch.tensor([tuple(other) == label for other in labels])
        assert (found.values[Z][same] == value).flatten(1).all(dim=1).any()


def test_steps_are_the_samplers_and_only_steps_those_that_are_kept(model):
    complete = donors(model, [LONG], Z, gen_length=4, steps=2)
    assert sorted(set(complete.step.tolist())) == [0, 1]
    last = donors(model, [LONG], Z, gen_length=4, steps=2, only_steps=[-1])
    assert set(last.step.tolist()) == {1}
    assert torch.equal(last.values[Z], complete.values[Z][complete.step == 1])
    means = [difference_of_means(model, [LONG], [SHORT], gen_length=4, steps=2, **more) for more in (
        {}, {"only_steps": [0]}, {"only_steps": [1]},
    )]  # fmt: skip
    assert means[0].counts == (2 * 11, 2 * 8)
    torch.testing.assert_close(2 * means[0].values, means[1].values + means[2].values)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("match", [("step", "state", "position", "kind"), ("state",)])
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_a_resampled_value_is_that_of_a_matching_donor(model, architecture, causal, settings, match):
    few = {"gen_length": 4} | settings
    found = donors(model, OTHERS, Z, **few)
    where = "prompt" if causal else "masked"
    if "position" in match and architecture == "sdar":  # rows end in other blocks than the donors'
        match = ("step", "state", "kind")
    resample = Resample(donors=found, where=where, match=match, heads=[0, 4])
    watched = watch(model, PADDED, [resample], ["1.attn.hook_z"], **few)
    plain = watch(model, PADDED, [], ["1.attn.hook_z"], replay=watched.run, **few)
    drawn = set()
    for (step, row, column, z), (*_, before) in zip(computed(watched), computed(plain), strict=True):
        _, state, *_ = label = labels_by_hand(watched.run, row, column, step)
        assert torch.equal(z[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
        if state != (PlaceState.PROMPT if causal else PlaceState.MASKED):
            assert torch.equal(z, before)
            continue
        same = (found.values[Z][:, [0, 4]] == z[[0, 4]]).flatten(1).all(dim=1).nonzero()[:, 0].tolist()
        wanted = dict(zip(("step", "state", "position", "kind"), label, strict=True))
        assert any(all(int(getattr(found, name)[at]) == wanted[name] for name in match) for at in same)
        drawn |= set(same)
    assert len(drawn) > 5


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("architecture", "causal", "settings"), [WAYS[0], *WAYS[3:]])
def test_draws_of_a_row_do_not_depend_on_its_batch_but_on_the_seed(worded, architecture, causal, settings):
    model, few = worded(architecture, causal), {"gen_length": 4} | settings
    found = donors(model, OTHERS, Z, **few)
    both, alone, other = (
        watch(model, prompts, [Resample(donors=found, match=["state"], seed=seed)], ["1.attn.hook_z"], **few)
        for prompts, seed in ((PADDED, 1), ([SHORT], 1), (PADDED, 2))
    )
    for step in range(alone.run.steps_run):
        z = alone.values[step][Z]
        assert torch.equal(both.values[step][Z][:1, -z.shape[1] :], z)
    assert not torch.equal(other.values[0][Z], both.values[0][Z])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("architecture", "causal", "settings"), [WAYS[0], *WAYS[3:]])
def test_resampled_values_are_those_of_an_edited_hook_v(worded, architecture, causal, settings):
    """If all heads change a key, its value is that of the donor, in the pass that computes it and in later ones."""
    model, few = worded(architecture, causal), {"gen_length": 4} | settings
    found = donors(model, OTHERS, V, **few)
    by_edit = watch(model, PADDED, [Resample(donors=found, match=["state"], where="prompt", seed=3)], ["hook_z"], **few)
    ablate = AblateValues(by="resample", reference=found, match=["state"], where="prompt", layers=[1], seed=3)
    by_key = watch(model, PADDED, [ablate], ["hook_z"], replay=by_edit.run, **few)
    for step in range(by_edit.run.steps_run):
        one, other = (watched.stacked("hook_z", step) for watched in (by_edit, by_key))
        counted = entered(by_edit.run, step)[1][:, -one.shape[2] :]
        torch.testing.assert_close(one[:, counted], other[:, counted], atol=1e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def found(worded):
    return donors(worded(), [SHORT], Z, gen_length=2)


REFUSED = [
    *(
        (lambda model, found, given=given: watch(model, [LONG], [Resample(donors=found, **given)], gen_length=2), text)
        for given, text in (
            ({}, r"no donor matches position 4 of row 0 at step 0 \(step 0, state prompt, pos"),
            (
                {"names": "blocks.0.attn.hook_z"},
                r"the donors have no 'blocks\.0\.attn\.hook_z'; they hold blocks\.1\.at",
            ),
            ({"match": "stat"}, r"match must be a list of step, state, position, kind; got \('stat',\)"),
            ({"match": ["token"]}, r"match must be a list of step, state, position, kind; got \['token'\]"),
        )
    ),
    (
        lambda model, found: donors(model, [SHORT], "blocks.0.attn.hook_pattern"),
        r"blocks\.0\.attn\.hook_pattern has no value for each position",
    ),
    (
        lambda model, found: AblateValues(by="resample", where="prompt"),
        r"by='resample' and reference=donors\(model, prompts, names\) belong together",
    ),
    (
        lambda model, found: Resample(donors=found).hooks_for(model),
        "Resample matches donors to the steps of a run; use it in trace or generate",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_has_no_donor_is_rejected(model, found, call, text):
    with pytest.raises(SettingError, match=text):
        call(model, found)
    assert repr(found) == f"Donors({2 * 6} samples of {Z})"
