"""Runs of the lab equal those of `sinklens.generate`, and are reported step by step."""

import re

import numpy as np
import pytest
import torch
from lab_client import Client, unpacked
from lab_page import PROMPT, SHORT
from torch import Tensor

import sinklens
from sinklens.errors import DeviceMemoryError
from sinklens.experiments import effect
from sinklens.interventions import (
    AblateHeads,
    AblateMLPs,
    ForceTokens,
    FreezePattern,
    HideKeys,
    HoldSinks,
    MaskSinks,
    Remask,
)
from sinklens.live.chips import CHIPS
from sinklens.live.execution import LiveRun
from sinklens.sinks import Record

ABLATED = [AblateHeads(layers=[1], heads=[5])]
CHANGES = {
    "ablate_head": ({"layer": 1, "head": 2, "by": "mean", "steps": [1, 3]},
                    AblateHeads(layers=[1], heads=[2], by="mean", steps=[1, 2, 3])),
    "ablate_heads": ({"layer": 1, "heads": [2, 5]}, AblateHeads(layers=[1], heads=[2, 5])),
    "ablate_mlp": ({"layer": 1, "steps": [0, 2]}, AblateMLPs(layers=[1], steps=[0, 1, 2])),
    "mask_head_sinks": ({"layer": 0, "head": 3, "top_k": 2}, MaskSinks(layers=[0], heads=[3], top_k=2)),
    "mask_sinks": ({"top_k": 5, "steps": [2, 6]}, MaskSinks(top_k=5, steps=[2, 3, 4, 5, 6])),
    "hide_key": ({"pos": 3, "layer": None, "head": None}, HideKeys(positions=[3])),
    "force_token": ({"pos": 26, "steps": [2, 2], "token": 500}, ForceTokens(tokens={26: 500}, steps=[2])),
    "remask": ({"pos": 25, "step": 5}, Remask(positions=[25], steps=[5])),
    "freeze_pattern": ({"layer": 2, "head": None, "from_step": 1}, FreezePattern(at=1, layers=[2])),
    "hold_sink": ({"layer": 0, "head": 1, "from_step": 0}, HoldSinks(at=0, layers=[0], heads=[1])),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_llada):
    """The unchanged run."""
    return sinklens.generate(tiny_llada, PROMPT, **SHORT)


@pytest.fixture(scope="module")
def base_id(lab):
    """The same run in the lab."""
    return Client(lab.address, lab.token).run(prompt=PROMPT, settings=SHORT)["summary"]["id"]


def test_steps_arrive_before_the_run_is_over(client, gate, base):
    run = client.submit(prompt=PROMPT, settings=SHORT)
    third = client.wait(lambda event: event.kind == "step" and event.data["run"] == run and event.data["step"] == 2)
    found = client.get(f"/api/runs/{run}")
    assert (found["summary"]["status"], found["canvas"]) == ("running", base.canvas[0, :4].tolist())
    now = {"canvas": base.canvas[0, 3].tolist(), "undecided": base.undecided[0, 3].nonzero()[:, 0].tolist()}
    assert {name: third.data[name] for name in now} == now
    scores = base.sinks.scores()[0, 2]
    for layer, heads in enumerate(third.data["sinks"]):
        for head, keys in enumerate(heads):
            expected = scores[layer, head].to_numpy()
            assert [place for place, _ in keys] == np.argsort(-expected, kind="stable")[:3].tolist()
            np.testing.assert_allclose([value for _, value in keys], np.sort(expected)[::-1][:3], atol=6e-4)
    np.testing.assert_allclose(unpacked(found["scores"]), base.sinks.scores()[0, :3], rtol=1e-3)
    gate.opened.set()
    assert client.ended(run)["canvas"] == base.canvas[0].tolist()
    kinds = [event.kind for event in client.events if event.data.get("run") == run]
    client.wait(lambda event: event.kind == "done" and event.data["run"] == run)
    assert kinds[:3] == ["queued", "started", "step"]


def test_a_run_has_all_that_the_page_shows_and_a_chip_that_is_off_changes_nothing(client, base):
    found = client.run(prompt=PROMPT, settings=SHORT, chips=[{"kind": "mask_sinks", "top_k": 10, "on": False}])
    assert (found["summary"]["chips"], len(found["chips"])) == (0, 1)
    expected = {
        "canvas": base.canvas[0].tolist(), "unmask_step": base.unmask_step[0].tolist(), "text": base.text,
        "tokens": {str(token): text for token, text in base.sinks.vocabulary.items()},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    np.testing.assert_allclose(unpacked(found["scores"]), base.sinks.scores()[0], rtol=1e-3)
    assert found["record"]["versions"] == base.sinks.data.attrs["versions"]


def test_a_cancelled_run_keeps_its_finished_steps(client, gate, base):
    run = client.submit(prompt=PROMPT, settings=SHORT)
    waiting = client.submit(prompt=PROMPT, settings=SHORT)
    assert gate.reached.wait(60)
    for one in (waiting, run):
        assert client.http.post(f"/api/runs/{one}/cancel").status_code == 202
    gate.opened.set()
    found = client.ended(run)
    assert (found["summary"]["status"], found["summary"]["steps_run"]) == ("cancelled", 3)
    assert found["canvas"] == base.canvas[0, :4].tolist()
    assert client.ended(waiting)["summary"]["status"] == "cancelled"
    client.wait(lambda event: event.kind == "cancelled" and event.data["run"] == waiting)
    assert not [event for event in client.events if event.kind == "started" and event.data["run"] == waiting]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", CHIPS)
def test_a_chip_is_its_intervention(client, tiny_llada, base, kind):
    fields, intervention = CHANGES[kind]
    expected = sinklens.generate(tiny_llada, PROMPT, hooks=intervention, **SHORT)
    found = client.run(prompt=PROMPT, settings=SHORT, chips=[{"id": "1", "kind": kind, **fields}])
    assert found["canvas"] == expected.canvas[0].tolist()
    np.testing.assert_allclose(unpacked(found["scores"]), expected.sinks.scores()[0], rtol=1e-3, atol=1e-6)
    scores, unchanged = unpacked(found["scores"]), base.sinks.scores()[0].to_numpy()
    assert scores.shape != unchanged.shape or not np.allclose(scores, unchanged, rtol=1e-2)


def test_a_replay_works_on_the_canvases_of_the_other_run(client, tiny_llada, base, base_id):
    expected = sinklens.generate(tiny_llada, PROMPT, hooks=MaskSinks(top_k=10), replay=base, **SHORT)
    found = client.run(prompt=PROMPT, settings=SHORT, chips=[{"kind": "mask_sinks", "top_k": 10}], replay=base_id)
    assert found["canvas"] == base.canvas[0].tolist()
    np.testing.assert_allclose(unpacked(found["scores"]), expected.sinks.scores()[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": f"Mia asks. {PROMPT}", "settings": SHORT}, r"replay holds 1 rows of \d+ positions, this run 1 of"),
        ({"prompt": PROMPT, "settings": {"gen_length": 8, "steps": 4}}, "replay has 8 steps, this run at most 4"),
    ],
    ids=["prompt", "steps"],
)
def test_a_replay_that_cannot_begin_is_refused_when_it_is_requested(client, base_id, body, text):
    answer = client.http.post("/api/runs", json=body | {"replay": base_id})
    assert (answer.status_code, "chip" in answer.json()) == (422, False)
    assert re.search(text, answer.json()["error"])


def test_an_autoregressive_model_runs_beside_the_other_and_is_compared_without_a_divergence(
    client, tiny_llama, base_id
):
    expected = sinklens.generate(tiny_llama, PROMPT, gen_length=8)
    found = client.run(model="tiny-llama", prompt=PROMPT, settings=SHORT)
    assert found["canvas"] == expected.canvas[0].tolist()
    np.testing.assert_allclose(unpacked(found["scores"]), expected.sinks.scores()[0], rtol=1e-3, atol=1e-6)
    assert np.isfinite(unpacked(client.get(f"/api/runs/{found['summary']['id']}/certainty"))).any()
    compared = client.get("/api/compare", a=base_id, b=found["summary"]["id"])
    assert compared["kl"] is None
    assert compared["kl_why"] == "KL is defined for two runs of one model; these are of two."


@pytest.mark.extended
def test_a_problem_brings_its_prompt_and_the_verdict(client, tiny_llada):
    given = {"task": "tiny-gsm", "index": 1}
    task = sinklens.tasks.find_task("tiny-gsm")
    sample = task.samples()[1]
    found = client.run(problem=given)
    assert found["spec"]["prompt"] == sample.prompt
    assert found["right"] == task.verdict(sample, sinklens.generate(tiny_llada, sample.prompt).text)
    assert client.run(ids=tiny_llada.encode(sample.prompt).ids[0].tolist())["canvas"] == found["canvas"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("changed", [True, False], ids=["with chips", "plain"])
def test_patterns_and_proposals_are_those_of_the_run_with_its_chips(client, tiny_llada, changed):
    seen: dict[int, Tensor] = {}

    def keep(value, hook):
        seen[hook.step] = value[0].clone()

    chips = [{"kind": "mask_sinks", "top_k": 3}, {"kind": "force_token", "pos": 25, "steps": [0, 0], "token": 40}]
    hooks = [MaskSinks(top_k=3), ForceTokens(tokens={25: 40}, steps=[0])] if changed else []
    run = sinklens.generate(
        tiny_llada, PROMPT, hooks=[*hooks, ("denoise.hook_logits", keep)], record_sinks=Record(patterns=[(5, 2)]),
        **SHORT,
    )  # fmt: skip
    run_id = client.run(prompt=PROMPT, settings=SHORT, chips=chips if changed else [])["summary"]["id"]
    found = client.get(f"/api/runs/{run_id}/pattern", step=5, layer=2)
    np.testing.assert_allclose(unpacked(found), run.patterns[5, 2][0], atol=2e-3)
    place = int(run.undecided[0, 3].nonzero()[-1])
    expected = torch.softmax(seen[3][place], dim=-1).sort(descending=True)
    found = client.get(f"/api/runs/{run_id}/proposals", step=3, pos=place)
    assert found["proposals"][0]["id"] == expected.indices[0]
    np.testing.assert_allclose([one["p"] for one in found["proposals"]], expected.values[:10], rtol=1e-3, atol=1e-7)
    assert found["confidence"] == pytest.approx(float(expected.values[0]), rel=1e-4)
    assert client.get(f"/api/runs/{run_id}/proposals", step=3, pos=2)["undecided"] is False


def test_a_comparison_has_the_divergence_and_the_differences(client, tiny_llada, base_id):
    expected = effect(tiny_llada, PROMPT, MaskSinks(top_k=5), **SHORT)
    runs = (expected.base, expected.free)
    second = client.run(prompt=PROMPT, settings=SHORT, chips=[{"kind": "mask_sinks", "top_k": 5}])["summary"]["id"]
    found = client.get("/api/compare", a=base_id, b=second)
    differs = (runs[0].canvas[0] != runs[1].canvas[0]).nonzero().tolist()
    assert differs, "the runs differ, or this test compares nothing"
    assert (found["cells"], found["first_difference"]) == (differs, differs[0][0])
    assert found["texts"] == [run.text for run in runs]
    changes = [change.kl.to_numpy()[0] for change in (expected.under_replay, expected.free_running)]
    kl = np.array([found["kl"], found["kl_free"]], dtype=float)
    np.testing.assert_allclose(kl, changes, rtol=1e-4, atol=1e-9, equal_nan=True)
    assert np.nanmax(kl[1]) > 0.01
    tops = [run.sinks.top(1)[0, :, :, :, 0].to_numpy() for run in runs]
    np.testing.assert_allclose(found["sinks_moved"], (tops[0] != tops[1]).mean(axis=(1, 2)), atol=1e-4)


NOWHERE = {  # name: (chip, model, text)
    "a layer": ({"kind": "ablate_head", "layer": 99, "head": 0}, "tiny-llada", "layer 99 does not exist; there are 4"),
    "a head": ({"kind": "hold_sink", "layer": 0, "head": 8, "from_step": 0}, "tiny-llada", "head 8 does not exist"),
    "a step": ({"kind": "mask_sinks", "steps": [0, 8]}, "tiny-llada", "step 8 does not exist; there are 8, 0 to 7"),
    "a kept step": ({"kind": "freeze_pattern", "layer": 0, "from_step": 9}, "tiny-llada", "step 9 does not exist"),
    "a key": ({"kind": "hide_key", "pos": 32}, "tiny-llada", "position 32 does not exist"),
    "a cell": (
        {"kind": "force_token", "pos": 90, "steps": [0, 0], "token": 1},
        "tiny-llada",
        "position 90 does not exist",
    ),
    "a token": (
        {"kind": "force_token", "pos": 25, "steps": [0, 0], "token": 9999},
        "tiny-llada",
        "token 9999 does not exist",
    ),
    "the prompt": (
        {"kind": "remask", "pos": 3, "step": 0},
        "tiny-llada",
        "Remask takes positions of the answer, 24 to 31 or -8 to -1",
    ),
    "a causal model": ({"kind": "remask", "pos": 25, "step": 0}, "tiny-llama", "a llama model has no mask token"),
    "a field": ({"kind": "remask", "step": 0}, "tiny-llada", "the chip remask needs pos"),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", NOWHERE)
def test_a_chip_at_a_place_that_does_not_exist_is_refused_with_its_id(client, gate, name):
    """Also while another run is under way."""
    chip, model, text = NOWHERE[name]
    running = client.submit(prompt=PROMPT, settings=SHORT)
    assert gate.reached.wait(60)
    chips = [{"kind": "mask_sinks", "id": "fine"}, chip | {"id": "bad"}, chip | {"id": "off", "on": False}]
    before = len(client.get("/api/session")["runs"])
    if text.startswith("the chip"):
        chips.pop()  # a chip that is off has its fields too
    answer = client.http.post("/api/runs", json={"prompt": PROMPT, "settings": SHORT, "model": model, "chips": chips})
    assert (answer.status_code, answer.json()["chip"]) == (422, "bad")
    assert answer.json()["error"].startswith(text)
    assert len(client.get("/api/session")["runs"]) == before
    gate.opened.set()
    assert client.ended(running)["summary"]["status"] == "done"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("boom"), "the run crashed with KeyError: 'boom'. The terminal has the traceback."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "tiny-llada ran out of memory on cpu in step 1 of 8"),
        (DeviceMemoryError("no memory left."), "no memory left."),
    ],
)
def test_a_crash_and_a_lack_of_memory_leave_the_lab_alive(client, base, monkeypatch, error, text):
    def crash(self, step, state):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(LiveRun, "after", crash)
        found = client.ended(client.submit(prompt=PROMPT, settings=SHORT))
    assert (found["summary"]["status"], found["summary"]["error"][: len(text)]) == ("failed", text)
    assert client.run(prompt=PROMPT, settings=SHORT)["canvas"] == base.canvas[0].tolist()


def test_a_removed_run_is_gone_for_every_tab(client):
    run = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    assert client.http.delete(f"/api/runs/{run}").status_code == 200
    client.wait(lambda event: event.kind == "removed" and event.data["run"] == run)
    assert client.http.get(f"/api/runs/{run}").status_code == 404
    assert run not in [entry["id"] for entry in client.get("/api/session")["runs"]]


def test_everything_about_a_canvas_model_is_answered():
    """Its steps read keys that an encoder cached, and it has no confidences."""
    model, runs = sinklens.load("tiny-canvas"), []
    with sinklens.lab(sinklens.load("tiny-canvas")) as opened:
        client = Client(opened.address, opened.token).follow()

        def tried(run):
            client.http.post(f"/api/runs/{run}/heads", json={"layer": 1})
            ended = client.wait(lambda event: event.kind == "heads" and event.data["status"] != "running")
            client.events.clear()
            assert ended.data["status"] == "done", ended.data["error"]
            return client.get(f"/api/runs/{run}")["heads"]

        for chips, hooks in (([], []), ([{"kind": "ablate_head", "layer": 1, "head": 5}], ABLATED)):
            recorded = sinklens.generate(model, PROMPT, hooks=hooks, record_sinks=Record(patterns=[(1, 2)]))
            runs.append(client.run(prompt=PROMPT, chips=chips)["summary"]["id"])
            pattern, length = (
                unpacked(client.get(f"/api/runs/{runs[-1]}/pattern", step=1, layer=2)),
                recorded.prompt_length,
            )
            np.testing.assert_allclose(pattern[:, length:], recorded.patterns[1, 2][0], atol=1e-3)
            assert np.isnan(pattern[:, :length]).all(), "the step computed no query of the prompt"
            found = client.get(f"/api/runs/{runs[-1]}/proposals", step=0, pos=length + 3)
            assert (found["confidence"], found["proposals"][0]["id"]) == (None, recorded.canvas[0, 1, length + 3])
        expected = effect(model, PROMPT, ABLATED)
        compared = client.get("/api/compare", a=runs[0], b=runs[1])
        changes = [change.kl.to_numpy()[0] for change in (expected.under_replay, expected.free_running)]
        kl = np.array([compared["kl"], compared["kl_free"]], dtype=float)
        np.testing.assert_allclose(kl, changes, rtol=1e-3, atol=1e-6, equal_nan=True)
        for path, status in (("page", 200), ("certainty", 200), ("lens?pos=3", 400)):
            assert client.http.get(f"/api/runs/{runs[0]}/{path}").status_code == status
        assert tried(runs[0])["heads"][5]["kl"] == pytest.approx(
            np.nanmean(expected.under_replay.kl), rel=1e-2, abs=1e-6
        )
        trial = tried(client.run(prompt=PROMPT, settings={"gen_length": 48})["summary"]["id"])
        assert trial["kl_why"] == "KL compares complete answers; run with a gen_length of one canvas."
        assert (trial["heads"][0]["kl"], trial["heads"][0]["same"]) == (None, True)
        client.close()


def test_a_run_under_a_cache_policy_equals_that_of_generate_and_reads_what_its_steps_computed(client, lab, tiny_llada):
    settings = SHORT | {"block_length": 4}
    run = client.submit(prompt=PROMPT, settings=settings, cache="dual")
    client.ended(run)
    expected = sinklens.generate(tiny_llada, PROMPT, cache="dual", progress=False, **settings)
    assert client.get(f"/api/runs/{run}")["canvas"] == expected.canvas[0].tolist()
    computed = ~np.isnan(unpacked(client.get(f"/api/runs/{run}/pattern", step=1, layer=0))).any(axis=(0, 2))
    assert computed.nonzero()[0].tolist() == list(range(expected.prompt_length, expected.prompt_length + 4))
    assert "cache='dual'" in client.http.get(f"/api/runs/{run}/python").text
    refused = client.http.get(f"/api/runs/{run}/lens", params={"pos": expected.prompt_length})
    assert refused.status_code == 400
    assert "run without cache=" in refused.text


def test_the_form_offers_a_policy_where_a_model_can_run_under_one(client):
    settings = client.get("/api/session")["settings"]
    assert [field["name"] for field in settings["tiny-llada"]["run"]] == ["cache"]
    assert settings["tiny-llama"]["run"] == []
