"""`AtNoise` acts at the steps and in the passes whose undecided share lies in its range, row by row."""

import pytest
import torch
from watching import PADDED, short

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import likelihood
from sinklens.interventions import Activations, AtNoise, Steer

POINT = "blocks.1.hook_resid_pre"


def changed(model, where, **settings):
    """Whether steering layer 1 changed a place: [batch, step, pos], with the run."""
    kept, steered = Activations(names=[POINT]), Activations(names=[POINT])
    base = sinklens.generate(model, PADDED, hooks=kept, **short(model, settings))
    hooks = [Steer(torch.ones(model.cfg.d_model), where=where, layers=[1]), steered]
    sinklens.generate(model, PADDED, hooks=hooks, replay=base, **short(model, settings))
    pairs = [(kept.caches[step][POINT], steered.caches[step][POINT]) for step in range(base.steps_run)]
    return torch.stack([(one != other).any(-1) for one, other in pairs], dim=1), base


@pytest.mark.parametrize(("least", "most"), [(0.5, 1.0), (0.0, 0.5), (0.3, 0.8)])
def test_it_acts_where_the_share_of_undecided_positions_is_in_the_range(worded, least, most):
    places, run = changed(worded(), AtNoise(least, most))
    share = run.undecided[:, :-1].sum(dim=2) / 8
    assert torch.equal(places, ((share >= least) & (share <= most))[:, :, None] & run.real[:, None])
    assert 0 < int(places.sum()) < places.numel()


def test_in_a_likelihood_it_acts_in_the_passes_with_as_many_masks(worded):
    """Of an answer of two tokens, masks of one of them have the share 0.5."""
    model, how = worded(), {"exact": True}
    direction = 5 * torch.ones(model.cfg.d_model)

    def losses(hooks):
        return torch.from_numpy(likelihood(model, [5, 9], [13, 7], hooks=hooks, **how).losses).nan_to_num()

    different = (losses([]) - losses(Steer(direction, where=AtNoise(0.9), layers=[1]))).abs() > 1e-6
    assert different.any(dim=1).tolist() == [False, False, True]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("given", "message"), [
    ((True, 1.0), "least must be a number from 0 to 1; got True"),
    ((-1, 1), "least must be a number from 0 to 1; got -1"),
    ((0.5, 1.5), r"most must be a number from 0 to 1; got 1\.5"),
    (("0", 1), "least must be a number from 0 to 1; got '0'"),
    ((0, float("nan")), "most must be a number from 0 to 1; got nan"),
    ((0.5,), "llama has no masks; use steps="),
])  # fmt: skip
def test_senseless_ranges_and_models_without_masks_are_refused(worded, given, message):
    with pytest.raises(SettingError, match=message):
        changed(worded("llama", True), AtNoise(*given))
