"""Trials of all heads: each effect is that of the run with the head ablated."""

import threading

import numpy as np
import pytest
from lab_page import PROMPT, SHORT

import sinklens
from sinklens.experiments import effect
from sinklens.interventions import AblateHeads
from sinklens.live import problems
from sinklens.live.problems import stated_number
from sinklens.live.thread import ModelThread


def tried(client, run: str, **body) -> list[dict]:
    """The effects of the heads of a run, from the events."""
    state = client.http.post(f"/api/runs/{run}/heads", json=body)
    assert state.status_code == 202, state.text
    assert state.json()["done"] == 0
    client.wait(lambda event: event.kind == "heads" and event.data["run"] == run and event.data["status"] != "running")
    listed = [entry for event in client.events if event.kind == "heads" for entry in event.data["heads"]]
    kept = client.get(f"/api/runs/{run}")["heads"]
    assert (kept["status"], kept["heads"]) == ("done", listed)
    return listed


@pytest.mark.fast_cases(1)
def test_each_head_has_the_effect_of_its_ablation(client, tiny_llada):
    found = tried(client, client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"], by="mean", layer=3)
    assert [(entry["layer"], entry["head"]) for entry in found] == [(3, head) for head in range(6)]
    for entry in found[:3]:
        expected = effect(tiny_llada, PROMPT, AblateHeads(layers=[3], heads=[entry["head"]], by="mean"), **SHORT)
        assert {name: entry[name] for name in ("kl", "text", "same", "changed")} == {
            "kl": pytest.approx(float(np.nanmean(expected.under_replay.kl)), rel=1e-3, abs=1e-7),
            "text": expected.free.text,
            "same": expected.free.text == expected.base.text,
            "changed": pytest.approx(expected.free_running.changed_share.item()),
        }
    assert len({entry["same"] for entry in found[:3]}) == 2  # otherwise the last assertion would say little


def test_the_number_of_an_answer_is_the_marked_one():
    texts = ["5 + 7 = 12 apples.\n#### 14", "of 3, -2 left", "x12 and 1,250.5.", "5-7", "#### none of 8", "no", None]
    assert [stated_number(text) for text in texts] == ["14", None, None, None, None, None, None]


@pytest.mark.extended
def test_a_run_with_chips_keeps_them_and_its_numbers_are_named_while_its_heads_are_tried(
    client, tiny_llada, monkeypatch
):
    monkeypatch.setattr(problems, "stated_number", lambda text: str(len(text)))
    chip = {"id": "a", "kind": "ablate_head", "layer": 0, "head": 0, "by": "zero"}
    run = client.run(prompt=PROMPT, settings=SHORT, chips=[chip])
    found = tried(client, run["summary"]["id"], layer=1)
    first, second = AblateHeads(layers=[0], heads=[0]), AblateHeads(layers=[1], heads=[5])
    alone, both = (sinklens.generate(tiny_llada, PROMPT, hooks=hooks, **SHORT) for hooks in (second, [first, second]))
    assert found[5]["text"] == both.text != alone.text
    assert client.get(f"/api/runs/{run['summary']['id']}")["heads"]["number"] == str(len(run["text"]))
    assert [entry["number"] for entry in found] == [str(len(entry["text"])) for entry in found]


def test_a_trial_can_be_stopped_and_one_that_cannot_begin_is_refused(client, gate):
    gate.opened.set()  # for the run itself
    run = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    gate.opened.clear(), gate.reached.clear()
    blocked = client.submit(prompt=PROMPT, settings=SHORT)
    assert gate.reached.wait(60)
    assert client.http.post(f"/api/runs/{run}/heads", json={}).json()["total"] == 24
    assert client.http.post(f"/api/runs/{run}/cancel", json={}).status_code == 202
    gate.opened.set()
    assert client.wait(lambda event: event.kind == "heads" and event.data["status"] == "cancelled").data["heads"] == []
    client.ended(blocked)
    for body, said in (({"by": "two"}, "zero, mean"), ({"layer": 4}, "0 to 3"), ({"layers": 1}, "by and layer")):
        answer = client.http.post(f"/api/runs/{run}/heads", json=body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]


def test_background_work_waits_for_runs_and_computations():
    thread, order, ended = ModelThread(), [], threading.Event()

    def queue():
        thread.background(lambda: (order.append("background"), ended.set()))
        thread.run("a", lambda: order.append("run"))
        thread.compute(lambda: order.append("computation"))

    thread.compute(queue).result(60)
    assert ended.wait(60)
    thread.close()
    assert order == ["computation", "run", "background"]
