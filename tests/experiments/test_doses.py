"""A direction that writes a token is found to do so, at a cost; one that does nothing has neither effect nor cost."""

import numpy as np
import pytest
import torch

from sinklens.errors import SettingError
from sinklens.experiments import dose_response, likelihood
from sinklens.interventions import AtNoise, Steer

TOKEN, PROMPTS, ANSWERS = 13, [[5, 9], [7, 31, 8]], [[20, 31, 7], [40, 9]]


def share_of_token(run):
    return (run.tokens[:, run.prompt_length :] == TOKEN).float().mean(dim=1)


def planted(model):
    """A direction of the last stream that the unembedding reads as the token."""
    weight = model.tree.hf.get_output_embeddings().weight.detach() * model.tree.hf.model.norm.weight.detach()
    toward = weight[TOKEN] - weight.mean(dim=0)
    return toward / toward.norm() * 10


@pytest.mark.extended
def test_a_planted_direction_has_its_effect_and_a_random_one_does_not(worded):
    model = worded()
    direction = planted(model)
    other = torch.randn(len(direction), generator=torch.Generator().manual_seed(2))
    other = other / other.norm() * 10
    place = {"layers": [model.cfg.n_layers - 1], "point": "hook_resid_post"}

    def push(dose):
        """Raises the token's logit: the cost of another token is log(1 + p (e^dose − 1)), p its share before."""
        return [("denoise.hook_logits", lambda logits, hook: logits + dose * (torch.arange(logits.shape[-1]) == TOKEN))]

    conditions = {
        "push": push,
        "token": lambda dose: Steer(direction, dose, **place),
        "random": lambda dose: Steer(other, dose, **place),
        "nothing": lambda dose: [],
        "late": lambda dose: Steer(direction, dose, where=AtNoise(0.0, 0.5), **place),
    }
    how = {"answers": ANSWERS, "gen_length": 8, "steps": 8, "mc_num": 16}
    found = dose_response(model, PROMPTS, conditions, [0.0, 1.0, 20.0], share_of_token, **how)
    assert found["effect"].dims == ("condition", "dose", "prompt")
    token = found.sel(condition="token")
    assert (token["effect"].sel(dose=20.0) == 1).all()
    assert (found["effect"].sel(condition="random", dose=20.0) < 0.5).all()
    assert (found["effect"].sel(condition="nothing") == found["base"]).all()
    assert (found["effect"].sel(dose=0.0) == found["base"]).all()
    assert 0.4 < float(found["effect"].sel(condition="late", dose=20.0).mean()) < 1
    np.testing.assert_allclose(found["cost"].sel(condition="nothing"), 0)
    pushed = found.sel(condition="push")
    assert (pushed["effect"].sel(dose=20.0) == 1).all()
    assert (pushed["cost"].sel(dose=20.0) > pushed["cost"].sel(dose=1.0)).all()
    assert (pushed["cost"].sel(dose=20.0) > 1).all()
    alone = likelihood(model, PROMPTS[1], ANSWERS[1], hooks=push(1.0), mc_num=16)
    expected = float(found["base_likelihood"][1]) - alone.value / len(alone.tokens)
    assert float(pushed["cost"].sel(dose=1.0)[1]) == pytest.approx(expected, abs=1e-5)


def test_a_cost_of_steps_and_measures_of_another_shape_are_refused(worded):
    model = worded()
    at_steps = {"x": lambda dose: Steer(torch.ones(24), dose, steps=[0])}
    one = {"answers": [[5]]}
    for call, match in [
        (lambda: dose_response(model, PROMPTS, at_steps, [1.0], share_of_token, answers=ANSWERS), "Steer has steps="),
        (lambda: dose_response(model, PROMPTS, at_steps, [1.0], lambda run: 1.0, gen_length=4), "one number for each"),
        (lambda: dose_response(model, PROMPTS, at_steps, [1.0], share_of_token, **one), "got 2 prompts and 1 answers"),
        (lambda: dose_response(model, PROMPTS, {}, [1.0], share_of_token), "a condition and a dose at least"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
