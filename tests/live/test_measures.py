"""What the page computes about a run when it is asked: certainty and lens."""

import numpy as np
import pytest
from lab_client import unpacked
from lab_page import PROMPT, SHORT

import sinklens
from sinklens.experiments import LogitLens, logit_lens
from sinklens.interventions import AblateHeads, MaskedLogits

ABLATED = [{"kind": "ablate_head", "layer": 1, "head": 5}]
POS = 27


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("chips", [ABLATED, []], ids=["with a chip", "unchanged"])
def test_the_certainty_of_a_step_and_the_lens_of_a_position_are_those_of_the_run(client, tiny_llada, chips):
    kept, lens = MaskedLogits(), LogitLens(positions=[POS], top_k=1)
    hooks = [*([AblateHeads(layers=[1], heads=[5])] if chips else []), kept, lens]
    run = sinklens.generate(tiny_llada, PROMPT, hooks=hooks, **SHORT)
    name = client.run(prompt=PROMPT, settings=SHORT, chips=chips)["summary"]["id"]
    confidence, entropy = unpacked(client.get(f"/api/runs/{name}/certainty")).astype(float)
    open_at = run.undecided[0, :-1].numpy()
    assert (~np.isnan(confidence) == open_at).all()
    for step, logits in kept.kept.items():
        p = logits.softmax(-1).numpy()
        np.testing.assert_allclose(confidence[step][open_at[step]], p.max(-1), atol=1e-3)
        expected = -(p * np.log(np.clip(p, 1e-30, None))).sum(-1)
        np.testing.assert_allclose(entropy[step][open_at[step]], expected, atol=4e-3)
    found = client.get(f"/api/runs/{name}/lens", pos=POS)
    data = lens.read(run) if chips else logit_lens(tiny_llada, run, positions=[POS], top_k=1)
    np.testing.assert_allclose(found["final_p"], data["final_probability"].to_numpy()[:, :, 0], atol=1e-5)
    np.testing.assert_allclose(found["entropy"], data["entropy"].to_numpy()[:, :, 0], atol=1e-4)
    assert chips or found["token"] == data["text"].to_numpy()[:, :, 0, 0].tolist()
