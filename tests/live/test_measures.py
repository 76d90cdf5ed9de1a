"""What the page computes about a run when it is asked: certainty, lens, attribution; and repetitions of a pair."""

import numpy as np
import pytest
from lab_client import Client, unpacked
from lab_page import PROMPT

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import attribution_patching, logit_lens, of_step
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


@pytest.mark.parametrize("chips", [[], ABLATED], ids=["unchanged", "with a chip"])
def test_the_certainty_of_a_step_is_that_of_its_logits(client, tiny_llada, chips):
    kept = MaskedLogits()
    hooks = [AblateHeads(layers=[1], heads=[5]), kept] if chips else [kept]
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


def test_the_lens_of_a_position_is_the_logit_lens(client, tiny_llada, base):
    run = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    found, data = client.get(f"/api/runs/{run}/lens", pos=POS), logit_lens(tiny_llada, base, positions=[POS], top_k=1)
    np.testing.assert_allclose(found["final_p"], data["final_probability"].to_numpy()[:, :, 0], atol=1e-5)
    np.testing.assert_allclose(found["entropy"], data["entropy"].to_numpy()[:, :, 0], atol=1e-4)
    assert found["token"] == data["text"].to_numpy()[:, :, 0, 0].tolist()
    changed = client.run(prompt=PROMPT, settings=SHORT, chips=ABLATED)["summary"]["id"]
    other = client.get(f"/api/runs/{changed}/lens", pos=POS)["final_p"]
    assert not np.allclose(other, found["final_p"], atol=1e-3), "a run with chips is read with them"


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


def test_a_pair_is_repeated_on_problems_with_an_interval(client, tiny_llada):
    first, second = (client.run(prompt=PROMPT, settings=SHORT, chips=chips) for chips in ([], ABLATED))
    a, b = (run["summary"]["id"] for run in (first, second))
    answer = client.http.post("/api/repeats", json={"a": a, "b": b, "over": "tiny-gsm", "count": 3})
    assert answer.status_code == 202, answer.text
    state = client.wait(lambda event: event.kind == "repeats" and event.data["status"] != "running").data
    ablate = AblateHeads(layers=[1], heads=[5])
    texts = [
        [
            sinklens.generate(tiny_llada, problems.problem("tiny-gsm", n).prompt, hooks=hooks, **SHORT).text
            for n in range(3)
        ]
        for hooks in ([], [ablate])
    ]
    changed = sum(one != two for one, two in zip(*texts, strict=True))
    assert (state["status"], state["done"], state["changed"]) == ("done", 3, changed)
    share = proportion(changed, 3)
    assert state["interval"] == pytest.approx((share.low, share.high), abs=1e-3)
    assert client.get("/api/compare", a=a, b=b, kl="0")["repeats"] == state


def test_seeds_that_change_nothing_give_no_interval(client):
    first, second = (client.run(prompt=PROMPT, settings=SHORT, chips=chips) for chips in ([], ABLATED))
    pair = {"a": first["summary"]["id"], "b": second["summary"]["id"]}
    client.http.post("/api/repeats", json=pair | {"over": "seeds", "count": 2})
    state = client.wait(lambda event: event.kind == "repeats" and event.data["done"] == 2).data
    assert (state["alike"], state["interval"]) == (True, None)
    for wrong in ({"over": "gsm8k"}, {"count": 1}, {"count": 10**6}):
        answer = client.http.post("/api/repeats", json=pair | {"over": "seeds", "count": 2} | wrong)
        assert answer.status_code == 400


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
        named = other.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
        assert other.http.post(f"/api/runs/{named}/note", json={"name": "plain", "note": "12"}).status_code == 200
        assert other.http.post(f"/api/runs/{named}/note", json={"name": 3, "note": ""}).status_code == 400
        other.close()
    with sinklens.lab("tiny-llada", keep=tmp_path) as again:
        (summary,) = Client(again.url).get("/api/session")["runs"]
        assert (summary["name"], summary["note"], summary["changes"]) == ("plain", "12", [])
