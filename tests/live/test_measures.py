"""What the page computes about a run when it is asked: certainty, lens, attribution; and repetitions of a pair."""

import numpy as np
import pytest
from lab_client import Client, unpacked
from lab_page import PROMPT

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import LogitLens, attribution_patching, logit_lens, of_step
from sinklens.interventions import AblateHeads, MaskedLogits
from sinklens.live import problems
from sinklens.utils.estimates import proportion

ABLATED = [{"kind": "ablate_head", "layer": 1, "head": 5}]
OTHER = PROMPT.replace("Tom has 5", "Tom has 8")
SHORT = {"gen_length": 8}
POS = 27


@pytest.fixture(scope="module")
def base(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPT, **SHORT)


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


@pytest.mark.extended
def test_the_lens_and_the_certainty_of_every_kind_of_model_are_read_or_refused():
    for name in ("tiny-canvas", "tiny-llama"):
        with sinklens.lab(sinklens.load(name)) as lab:
            client = Client(lab.url)
            run = client.run(prompt=PROMPT)["summary"]["id"]
            assert np.isfinite(unpacked(client.get(f"/api/runs/{run}/certainty"))).any()
            answer = client.http.get(f"/api/runs/{run}/lens", params={"pos": POS})
            assert answer.status_code in (200, 400, 422), answer.text
            client.close()


def test_the_attribution_by_layer_and_step_is_attribution_patching(client, tiny_llada, base):
    run = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    answer = client.http.post(f"/api/runs/{run}/attribution", json={"pos": POS, "prompt": OTHER})
    assert answer.status_code == 200, answer.text
    found, token = answer.json(), int(base.canvas[0, -1, POS])
    assert found["steps"] == base.undecided[0, :-1, POS].nonzero()[:, 0].tolist()
    other = sinklens.generate(tiny_llada, OTHER, **SHORT).canvas[:, 0, : base.prompt_length]
    step = found["steps"][-1]
    clean = of_step(base, step).ids
    corrupted = clean.clone()
    corrupted[:, : base.prompt_length] = other
    metric = lambda logits: logits.log_softmax(-1)[0, POS, token]  # noqa: E731
    effects = attribution_patching(tiny_llada, clean, corrupted, metric, "blocks.2.hook_mlp_out")
    assert found["mlp"][-1][2] == pytest.approx(float(effects["hook_mlp_out"].sum()), rel=1e-3, abs=1e-6)
    refused = client.http.post(f"/api/runs/{run}/attribution", json={"pos": POS, "prompt": "short"})
    assert (refused.status_code, "as many tokens" in refused.text) == (400, True)


@pytest.mark.extended
def test_a_pair_is_repeated_on_problems_or_with_seeds_with_an_interval_if_they_matter(client, tiny_llada):
    a, b = (client.run(prompt=PROMPT, settings=SHORT, chips=chips)["summary"]["id"] for chips in ([], ABLATED))
    asked = {"a": a, "b": b, "over": "tiny-gsm", "count": 2}
    answer = client.http.post("/api/repeats", json=asked)
    assert answer.status_code == 202, answer.text
    state = client.wait(lambda event: event.kind == "repeats" and event.data["status"] != "running").data
    prompts = [problems.problem("tiny-gsm", number).prompt for number in range(2)]
    texts = [
        [sinklens.generate(tiny_llada, prompt, hooks=hooks, **SHORT).text for prompt in prompts]
        for hooks in ([], [AblateHeads(layers=[1], heads=[5])])
    ]
    changed = sum(one != two for one, two in zip(*texts, strict=True))
    assert (state["status"], state["done"], state["changed"]) == ("done", 2, changed)
    share = proportion(changed, 2)
    assert state["interval"] == pytest.approx((share.low, share.high), abs=1e-3)
    assert client.get("/api/compare", a=a, b=b, kl="0")["repeats"] == state
    client.http.post("/api/repeats", json=asked | {"over": "seeds"})
    seeds = client.wait(lambda event: event.data.get("over") == "seeds" and event.data["done"] == 2).data
    assert (seeds["alike"], seeds["interval"]) == (True, None)
    for wrong in ({"over": "gsm8k"}, {"count": 1}, {"count": 10**6}):
        assert client.http.post("/api/repeats", json=asked | wrong).status_code == 400


def test_a_run_is_named_and_read_in_the_notebook(lab, client, tmp_path, base):
    with pytest.raises(SinklensError, match="no page shows a run B"):
        _ = lab.run_b
    run = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    assert client.http.post("/api/shown", json={"A": run, "B": None}).status_code == 200
    assert lab.run_a.canvas.equal(base.canvas)
    assert lab.run_a.text == base.text
    assert client.http.post("/api/shown", json={"A": "none", "B": None}).status_code == 404
    with sinklens.lab("tiny-llada", keep=tmp_path) as kept:
        other = Client(kept.url)
        named = other.run(prompt="Question: 1", settings={"gen_length": 2})["summary"]["id"]
        assert other.http.post(f"/api/runs/{named}/note", json={"name": "plain", "note": "12"}).status_code == 200
        assert other.http.post(f"/api/runs/{named}/note", json={"name": 3, "note": ""}).status_code == 400
        other.close()
    with sinklens.lab("tiny-llada", keep=tmp_path) as again:
        (summary,) = Client(again.url).get("/api/session")["runs"]
        assert (summary["name"], summary["note"], summary["changes"]) == ("plain", "12", [])
