"""The stream is steered and clamped as by the formulas, at its places alone; directions are differences of means."""

import pytest
import torch
from watching import LONG, PADDED, again, entered, unwatched, watch

from sinklens.errors import SettingError
from sinklens.experiments import difference_of_means
from sinklens.interventions import ClampStream, Steer
from sinklens.interventions.streams import Directions

WAYS = [("llama", False, {}), ("sdar", False, {}), ("llama", True, {}), ("llama", True, {"use_cache": False})]
PRE = "blocks.1.hook_resid_pre"
DIRECTION = torch.linspace(-1.0, 2.0, 24)


def edited(mode, coefficient):
    """What `Steer` does to one vector, component by component."""
    unit = DIRECTION / sum(float(x) ** 2 for x in DIRECTION) ** 0.5

    def edit(vector):
        component = sum(float(a) * float(b) for a, b in zip(vector, unit, strict=True))
        if mode == "add":
            return vector + coefficient * DIRECTION
        return vector + (-coefficient * component if mode == "project_out" else coefficient - component) * unit

    return edit


def clamped(vector):
    """Dimensions 3 and 20, limited to 0.05 and 0.1."""
    new = vector.clone()
    for dim, most in ((3, 0.05), (20, 0.1)):
        new[dim] = max(-most, min(most, float(vector[dim])))
    return new


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize(
    ("hooks", "edit"),
    [
        (Steer(DIRECTION, 2.0, layers=[1], where="committed"), edited("add", 2.0)),
        (Steer(DIRECTION, mode="project_out", layers=[1], where="committed"), edited("project_out", 1.0)),
        (Steer(DIRECTION, 3.0, mode="set", layers=[1], where="committed"), edited("set", 3.0)),
        (ClampStream(1, dims=[3, -4], at=[0.05, 0.1], mode="limit", where="committed"), clamped),
        (ClampStream(-2, dims=[5], at=7, where="committed"), lambda vector: vector.index_fill(0, torch.tensor(5), 7.0)),
    ],
    ids=["add", "project_out", "set", "limit", "clamp"],
)
@pytest.mark.parametrize(("architecture", "causal", "settings"), WAYS)
def test_the_stream_of_decided_answer_positions_changes_by_the_formula(
    worded, architecture, causal, settings, hooks, edit
):
    model = worded(architecture, causal)
    watched = watch(model, PADDED, [hooks], ["1.hook_resid_pre", "hook_logits"], **settings)
    run, changed = watched.run, 0
    for step in range(run.steps_run):
        ids, real = entered(run, step)

        def change(stream, ids=ids, real=real):
            stream = stream.clone()
            for row, column in real.nonzero().tolist():
                if column >= run.prompt_length and ids[row, column] not in (-1, model.mask_token_id):
                    stream[row, column] = edit(stream[row, column])
            return stream

        plain = again(run, step, {PRE: change})
        size = watched.values[step][PRE].shape[1]
        counted = real[:, -size:]
        new, wanted = watched.values[step][PRE], plain.values[PRE][:, -size:]
        torch.testing.assert_close(new[counted], wanted[counted], atol=1e-4, rtol=1e-4)
        logits = watched.values[step]["denoise.hook_logits"]
        counted = real[:, -logits.shape[1] :]
        torch.testing.assert_close(logits[counted], plain.logits[:, -logits.shape[1] :][counted], atol=1e-3, rtol=1e-3)
        changed += int((ids[:, run.prompt_length :] != (model.mask_token_id or -1)).sum())
    assert changed > 5
    assert unwatched(model)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("architecture", "causal", "where"),
    [("llama", False, where) for where in (None, "prompt", "masked", "committed")]
    + [("sdar", False, "masked"), ("llama", True, "prompt"), ("llama", True, "committed")],
)
def test_a_direction_is_the_difference_of_means_over_its_places(worded, architecture, causal, where):
    model, sets, steps = worded(architecture, causal), (PADDED, ["w9 w8 w7", "w6 w5 w4 w3"]), [0, 2, 3]
    found = difference_of_means(model, *sets, where=where, only_steps=steps, gen_length=4)
    means, counts = [], []
    for prompts in sets:
        watched, vectors = watch(model, prompts, points=["1.hook_resid_pre"], gen_length=4), []
        for step in set(steps) & set(watched.values):
            (ids, real), value = entered(watched.run, step), watched.values[step][PRE]
            first = ids.shape[1] - value.shape[1]
            for row, column in real.nonzero().tolist():
                masked = not causal and ids[row, column] == model.mask_token_id
                state = "masked" if masked else "committed" if column >= watched.run.prompt_length else "prompt"
                active = causal or bool((ids[row] == model.mask_token_id)[real[row]].any())
                if column >= first and active and where in (None, state):
                    vectors.append(value[row, column - first])
        means.append(torch.stack(vectors).mean(dim=0))
        counts.append(len(vectors))
    assert found.counts == tuple(counts)
    torch.testing.assert_close(found.values[1].float(), means[0] - means[1], atol=1e-5, rtol=1e-4)


def test_a_direction_is_taken_after_the_hooks_that_plant_a_behavior(worded):
    model, sets = worded(), ([LONG], ["w9 w8 w7"])
    planted = Steer(DIRECTION, 3.0, mode="set", layers=[1])  # both sets have the same component along it
    plain, found = (difference_of_means(model, *sets, gen_length=2, steps=1, hooks=hooks) for hooks in ((), planted))
    along = DIRECTION.double() / DIRECTION.double().norm()
    torch.testing.assert_close(found.values[0], plain.values[0])
    assert abs(float(found.values[1] @ along)) < 1e-5 < 1e-3 < abs(float(plain.values[1] @ along))


def test_directions_bring_their_point_and_one_vector_per_layer(worded):
    model = worded()
    found = Directions(torch.stack([DIRECTION * factor for factor in (1.0, 2.0, 3.0)]), "hook_resid_mid")
    watched = watch(model, [LONG], [Steer(found, 0.5, layers=[1])], ["1.hook_resid_mid"])
    base = watch(model, [LONG], points=["1.hook_resid_mid"], replay=watched.run)
    name = "blocks.1.hook_resid_mid"
    torch.testing.assert_close(watched.values[0][name], base.values[0][name] + DIRECTION, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_directions_and_dimensions_that_do_not_fit_are_rejected(worded):
    model = worded()
    with pytest.raises(SettingError, match=r"direction must have shape \[24\] or \[3, 24\]; got \[25\]"):
        watch(model, [LONG], [Steer(torch.ones(25))])
    with pytest.raises(SettingError, match="mode='set' needs a direction that is not zero"):
        watch(model, [LONG], [Steer(torch.zeros(24), mode="set")])
    with pytest.raises(SettingError, match="mode must be one of add, project_out, set; got 'mul'"):
        Steer(DIRECTION, mode="mul")
    with pytest.raises(SettingError, match="the directions belong to hook_resid_mid; leave out point='hook_resid_pre'"):
        Steer(Directions(torch.ones(3, 24), "hook_resid_mid"), point="hook_resid_pre")
    with pytest.raises(SettingError, match="point must be one of hook_resid_pre, hook_resid_mid, hook_resid_post"):
        Steer(DIRECTION, point="hook_embed")
    with pytest.raises(SettingError, match="dim 24 does not exist; there are 24"):
        watch(model, [LONG], [ClampStream(0, dims=[24])])
    with pytest.raises(SettingError, match=r"at must be one number, or one for each of 2 dims; got \[1.0\]"):
        ClampStream(0, dims=[1, 2], at=[1.0])
    with pytest.raises(SettingError, match="a limit must not be negative; got at=-1"):
        ClampStream(0, dims=[1], at=-1, mode="limit")
    with pytest.raises(SettingError, match="mode must be one of set, limit; got 'clip'"):
        ClampStream(0, dims=[1], mode="clip")
    with pytest.raises(SettingError, match="ClampStream does not support layers=; leave it out"):
        ClampStream(0, dims=[1], layers=[1])
    with pytest.raises(SettingError, match="the runs of the positive prompts have no position at where='newline'"):
        difference_of_means(model, [LONG], [LONG], where="newline", gen_length=2)
