"""The stream is steered as by the formulas, at its places alone; directions are differences of means."""

import pytest
import torch
from watching import LONG, PADDED, entered, watch

from sinklens.errors import SettingError
from sinklens.experiments import difference_of_means
from sinklens.interventions import Steer

PRE = "blocks.1.hook_resid_pre"
DIRECTION = torch.linspace(-1.0, 2.0, 24)


@pytest.mark.fast_cases(1)
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


REFUSED = [
    (
        lambda model: watch(model, [LONG], [Steer(torch.ones(25))]),
        r"direction must be a tensor of shape \[24\] or \[3, 24\]; got \[25\]",
    ),
    (
        lambda model: watch(model, [LONG], [Steer([1.0] * 24)]),
        r"direction must be a tensor \[\*layer, d_model\] .*; got \[1\.0",
    ),
    (
        lambda model: watch(model, [LONG], [Steer(torch.zeros(24), mode="set")]),
        "mode='set' needs a direction that is not zero",
    ),
    (lambda model: Steer(DIRECTION, mode="mul"), "mode must be one of add, project_out, set; got 'mul'"),
    (
        lambda model: Steer(DIRECTION, point="hook_embed"),
        "point must be one of hook_resid_pre, hook_resid_mid, hook_resid_post",
    ),
    (
        lambda model: difference_of_means(model, [LONG], [LONG], where="newline", gen_length=2),
        "the runs of the positive prompts have no position at where='newline'",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_directions_and_places_that_do_not_fit_are_rejected(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded())
