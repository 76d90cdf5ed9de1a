"""Measured effects of interventions, compared with separate runs."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import sinklens
from sinklens.analyses.answers import KEYS, costs_over, free_effects, is_right, masked, swept, unchanged
from sinklens.analyses.mechanism import Mechanism
from sinklens.experiments import effect
from sinklens.interventions import AblateHeads, MaskKeys
from sinklens.tasks import held_out

PROBLEM = held_out(2)[1]
SETTINGS = {"gen_length": 8}
LISTED = {"none": [], "window": MaskKeys(keep=True, window=4, positions=[0]), "heads": AblateHeads(layers=[0, 1])}


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_effects_equal_those_of_separate_runs(shipped, name):
    asked = (Mechanism(), shipped, PROBLEM.prompt, SETTINGS)
    found, replayed = free_effects(*asked, LISTED), swept(*asked, LISTED, replay=True)
    assert found["intervention"].to_numpy().tolist() == list(LISTED)
    for key, hooks in LISTED.items():
        one, got = effect(shipped, [PROBLEM.prompt], hooks, **SETTINGS), found.sel(intervention=key)
        np.testing.assert_allclose(replayed["kl"].sel(intervention=key), one.under_replay["kl"][0], atol=1e-4)
        assert float(got["changed"]) == float(not one.free_running["same_answer"].item())
        assert float(got["right"]) == is_right(PROBLEM.prompt, one.free.text[0])
    assert float(replayed["kl"].sel(intervention="heads").mean()) > 0.05
    assert float(found["changed"].sel(intervention="none")) == 0
    cells = costs_over(*asked, {"key": ["window", "other", "heads"]}, {key: LISTED[key] for key in ("window", "heads")})
    base = found["right"].sel(intervention="none")
    assert float(cells["base"]) == float(base)
    for key in ("window", "heads"):
        assert float(cells["cost"].sel(key=key)) == float(base - found["right"].sel(intervention=key))
    assert all(np.isnan(cells[name].sel(key="other")) for name in ("right", "cost", "changed"))


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_steady_masking_hides_the_strongest_keys_of_the_unchanged_runs_previous_step(name, request):
    """The paper's masking of a lasting sink masks a different key at every other step."""
    model, study = request.getfixturevalue(name), Mechanism()
    track = unchanged(study, model, PROBLEM.prompt, SETTINGS)
    base = sinklens.generate(model, [PROBLEM.prompt], **SETTINGS)
    strongest, seen = track.top(1).isel(batch=0, rank=0).to_numpy(), {}
    assert list(masked(track)) == list(KEYS)
    for way, mask in masked(track, layers=[1, 2], heads=[0, 5]).items():
        for step, layer in np.ndindex(track.steps, model.cfg.n_layers):
            seen[way, step, layer] = None

        def keep(bias, hook, way=way):
            seen[way, hook.step, hook.layer()] = bias[0, :, -1] == -torch.inf

        hooks = [mask, (lambda name: name.endswith("hook_attn_mask"), keep)]
        sinklens.generate(model, [PROBLEM.prompt], hooks=hooks, replay=base, record_sinks=False, **SETTINGS)
    for step, layer in np.ndindex(track.steps, model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            hidden = {way: seen[way, step, layer][head].nonzero()[:, 0].tolist() for way in KEYS}
            if step == 0 or layer not in (1, 2) or head not in (0, 5):
                assert hidden == {way: [] for way in KEYS}
            else:
                assert hidden["steady"] == [strongest[step - 1, layer, head]]
                assert len(hidden["strongest"]) == len(hidden["random"]) == 1
                assert hidden["random"] != hidden["steady"]
                assert hidden["steady"][0] not in hidden["same_mass"]
                assert any(seen["same_mass", step, layer][other].any() for other in (0, 5))
    again = [seen["strongest", step, 1][0].nonzero().item() for step in range(1, track.steps)]
    assert all(one != following for one, following in pairwise(again))


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        ("Tom has 5 + 7 = 12.\n#### 12", "So 12.\n#### 12", 1),
        ("Tom has 5 + 7 = 12.\n#### 12", "12", 0),
        ("12", "Tom has 12.\n#### 12", 1),
        ("12", " 12\n", 1),
        ("12", "12 apples", 0),
        ("12", "The answer is 12.", 1),
        ("12", "The answer is 13.", 0),
        ("Tom has 5 + 7 = 12.\n#### 12", "So the answer is: $12.", 1),
        ("1,234", "#### 1234", 1),
        ("#### 1,234", "#### 1,999", 0),
        ("Paris", " Paris ", 1),
        ("Paris", "Paris.", 0),
    ],
)
def test_answers_to_own_prompts_are_compared_by_their_number_or_their_text(expected, text, right):
    assert is_right("Mine?", text, {"Mine?": expected}) == right
    assert is_right(PROBLEM.prompt, f"so\n#### {PROBLEM.result}") == 1
    assert is_right(PROBLEM.prompt, f"so\nThe answer is {PROBLEM.result}.") == 1
    assert np.isnan(is_right("Mine?", text))
    assert np.isnan(is_right([2, 3], text, {"Mine?": expected}))
