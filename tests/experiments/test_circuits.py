"""Circuits: run alone as in plain torch, found where they were planted and not elsewhere, kept on disk, drawn."""

import json

import numpy as np
import pytest
import torch
import xarray as xr
from building import random_hf, random_ids, random_model, shared_model
from circuit_oracle import alone

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.experiments import (
    Circuit,
    circuit_case,
    circuit_cases,
    circuit_curves,
    corrupted,
    edge_attribution,
    edge_scores,
    greedy_circuit,
    measure_circuit,
    path_patching_effects,
)
from sinklens.interventions import Activations, KeepEdges

PLANTED = {"embed", "L0H1", "1_mlp_out"}, {"L0H1.q", "L0H1.k", "L0H1.v", "1_mlp_in", "logits"}
POINTS = ["hook_embed", *(f"blocks.{n}.{p}" for n in range(3) for p in ("attn.hook_z", "hook_mlp_out"))]


def bent(logits):
    """A nonlinear metric of the last position."""
    weights = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    return (weights * logits[:, -1].log_softmax(dim=-1)).sum() / 10


def neighbours(batch=2, length=6):
    clean = random_ids(batch, length)
    other = clean.clone()
    other[:, [1, -1]] = (clean[:, [1, -1]] + 7) % 60
    return clean, other


def planted():
    """A model in which only head 0.1 and the MLP of layer 1 write anything; each key/value head serves one head."""
    model = random_model(num_key_value_heads=6)
    for number, layer in enumerate(model.tree.hf.model.layers):
        kept = layer.self_attn.o_proj.weight.data[:, 4:8].clone()
        layer.self_attn.o_proj.weight.data.zero_()
        if number == 0:
            layer.self_attn.o_proj.weight.data[:, 4:8] = kept
        if number != 1:
            layer.mlp.down_proj.weight.data.zero_()
    return model


@pytest.fixture(scope="module")
def planted_case():
    return circuit_case(planted(), *neighbours(), bent)


def is_planted(scores):
    """True at the edges of the planted circuit."""
    senders, receivers = PLANTED
    found = np.array([[a in senders and b in receivers for b in scores.receiver.values] for a in scores.sender.values])
    return scores.copy(data=found) & ~np.isnan(scores)


@pytest.mark.parametrize("by_position", [False, True])
def test_a_random_circuit_alone_equals_plain_torch(by_position):
    model, (clean, other) = random_model(), neighbours()
    scores = edge_attribution(model, clean, other, bent, by_position=by_position)["effect"]
    circuit = Circuit.strongest(scores, share=0.5).random(3)
    kept = circuit.kept.reset_coords(drop=True)

    def keeps(sender, receiver, pos):
        cell = kept.sel(sender=sender, receiver=receiver)
        return bool(cell[pos] if by_position else cell)

    _, cache = model.run_with_cache(other)
    found = model.run_with_hooks(clean, circuit.alone({0: cache}).hooks_for(model))
    with torch.no_grad():
        expected = alone(model, clean, other, keeps)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(found, model(clean), atol=1e-2)


def test_all_edges_are_the_clean_pass_and_none_the_corrupted_one():
    model, (clean, other) = shared_model("qwen3"), neighbours()
    case = circuit_case(model, clean, other, bent)
    scores = edge_scores([case]).mean("step", skipna=False)
    every = measure_circuit([case], Circuit.strongest(scores, share=1.0))
    none = measure_circuit([case], Circuit.strongest(scores, count=0))
    assert every.faithfulness == pytest.approx(1.0, abs=1e-5)
    assert every.completeness == pytest.approx(1.0, abs=1e-5)
    assert none.faithfulness == pytest.approx(0.0, abs=1e-5)
    assert none.completeness == pytest.approx(0.0, abs=1e-5)


def test_a_circuit_without_one_edge_is_that_edge_patched():
    model, (clean, other) = random_model(), neighbours()
    case = circuit_case(model, clean, other, bent)
    full = Circuit.strongest(edge_scores([case])[0], share=1.0)
    truth = path_patching_effects(model, other, clean, bent, senders=["embed", "L0H4"], receivers=["L1H1.k", "logits"])
    for sender in ("embed", "L0H4"):
        for receiver in ("L1H1.k", "logits"):
            kept = full.kept.copy()
            kept.loc[{"sender": sender, "receiver": receiver}] = False
            value = measure_circuit([case], Circuit(kept, full.scores))
            effect = truth["effect"].sel(sender=sender, receiver=receiver).item()
            assert value.metric - value.full == pytest.approx(effect, abs=1e-5)


def test_the_planted_circuit_is_found_faithful_and_complete_and_random_ones_are_not(planted_case):
    scores = edge_scores([planted_case], path=4)[0]
    truth = is_planted(scores)
    assert np.abs(scores.where(~truth)).max() == 0.0  # nothing outside it
    assert np.abs(scores.where(truth)).min() > 0.0
    circuit = Circuit.strongest(scores, count=int(truth.sum()))
    assert (circuit.kept == truth).all()
    value = measure_circuit([planted_case], circuit)
    assert value.faithfulness == pytest.approx(1.0, abs=1e-5)
    assert value.completeness == pytest.approx(1.0, abs=1e-5)
    curves = circuit_curves([planted_case], scores, [circuit.share], draws=3)
    assert curves["faithfulness"].sel(kind="circuit").item(0) == pytest.approx(1.0, abs=1e-5)
    assert np.abs(curves["faithfulness"].sel(kind="random")).max() < 0.9
    assert (curves["changed"] == 0).all()  # it has all edges between its components, so no two can be exchanged
    assert curves["edges"].item() == circuit.size


def test_greedy_removal_leaves_only_planted_edges(planted_case):
    scores = edge_scores([planted_case])[0]
    found = greedy_circuit([planted_case], Circuit.strongest(scores, share=1.0), tolerance=1e-4, most=140)
    truth = is_planted(scores)
    tried = Circuit.strongest(scores, share=1.0).size - 140
    assert found.size <= tried
    assert (found.kept | ~truth).all()  # no planted edge is among the 140 weakest, so all are left
    assert measure_circuit([planted_case], found).faithfulness == pytest.approx(1.0, abs=1e-2)


def test_scores_over_steps_and_positions_sum_to_those_of_one_pass(tiny_llada):
    prompt = "Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:"
    run = sinklens.generate(tiny_llada, prompt, gen_length=8, steps=4, record_sinks=False)
    cases = circuit_cases(run, {" 6": " 7"}, steps=[1, -1])
    assert [case.step for case in cases] == [1, 3]
    for case in cases:
        changed = (case.pair.clean != case.pair.corrupted).nonzero()
        assert len(changed) == 1
        assert torch.equal(case.pair.clean, run.canvas[:, case.step])
    by_position, total = edge_scores(cases, by_position=True), edge_scores(cases)
    np.testing.assert_allclose(by_position.sum("pos", skipna=False), total, atol=1e-5)
    assert by_position.sizes["pos"] == run.canvas.shape[2]


def test_a_run_keeps_the_circuit_at_the_steps_of_its_source(worded):
    model = worded()
    base = sinklens.generate(model, "w8 w9 w10", gen_length=6, steps=3, record_sinks=False)
    kept = Activations(names=POINTS)
    corrupted(base, {"w9": "w5"}, hooks=kept, record_sinks=False)
    cases = circuit_cases(base, {"w9": "w5"})
    circuit = Circuit.strongest(edge_scores(cases), share=0.2)  # by step
    logits = {}
    hooks = [
        circuit.alone(kept.caches, steps=[0, 2]),
        ("denoise.hook_logits", lambda value, hook: logits.update({hook.step: value.clone()})),
    ]
    sinklens.generate(model, "w8 w9 w10", gen_length=6, steps=3, replay=base, hooks=hooks, record_sinks=False)
    for step in range(3):
        plain = model(base.canvas[:, step])
        now = circuit.kept.sel(step=step, drop=True)
        _, cache = model.run_with_cache(cases[step].pair.corrupted)
        expected = model.run_with_hooks(cases[step].pair.clean, KeepEdges(kept=now, source={0: cache}).hooks_for(model))
        torch.testing.assert_close(logits[step], plain if step == 1 else expected, atol=1e-4, rtol=1e-4)
        assert torch.allclose(logits[step], plain, atol=1e-3) == (step == 1)


def small():
    """Scores of a model of two layers with two heads, hand-made."""
    senders, receivers = ["embed", "L0H0", "0_mlp_out"], ["L0H0.q", "0_mlp_in", "logits"]
    values = np.array([[5.0, -4.0, 3.0], [np.nan, 2.0, -1.0], [np.nan, np.nan, 0.5]])
    return xr.DataArray(values, {"sender": senders, "receiver": receivers}, ("sender", "receiver"))


def test_a_circuit_is_a_choice_of_the_strongest_edges():
    circuit = Circuit.strongest(small(), count=3)
    assert [(edge.sender, edge.receiver, edge.score) for edge in circuit.edges] == [
        ("embed", "L0H0.q", 5.0), ("embed", "0_mlp_in", -4.0), ("embed", "logits", 3.0),
    ]  # fmt: skip
    assert circuit.share == 0.5
    assert circuit.complement().size == 3
    assert circuit.overlap(Circuit.strongest(small(), count=2)) == (2, pytest.approx(2 / 3), 1.0)
    assert circuit.overlap(circuit.complement()).jaccard == 0.0
    assert repr(circuit) == "Circuit(3 of 6 edges)"


def test_controls_have_the_size_and_the_degrees_of_the_circuit():
    model, (clean, other) = random_model(), neighbours()
    circuit = Circuit.strongest(edge_scores([circuit_case(model, clean, other, bent)])[0], share=0.1)
    for seed in range(3):
        random, matched = circuit.random(seed), circuit.degree_matched(seed)
        assert random.size == matched.size == circuit.size
        for axis in ("sender", "receiver"):
            assert (matched.kept.sum(axis) == circuit.kept.sum(axis)).all()
        assert 0 < matched.overlap(circuit).shared < circuit.size
        assert random.overlap(circuit).shared < circuit.size / 2
    assert (circuit.random(1).kept == circuit.random(1).kept).all()
    assert (circuit.random(1).kept != circuit.random(2).kept).any()


def test_a_circuit_is_read_as_it_was_saved(tmp_path):
    scores = xr.concat([small(), -2 * small()], "step").assign_coords(step=[3, 5])
    circuit = Circuit.strongest(scores, count=4)
    circuit.save(tmp_path / "circuit.nc")
    read = Circuit.load(tmp_path / "circuit.nc")
    assert read.edges == circuit.edges
    xr.testing.assert_equal(read.scores, circuit.scores)
    assert read.edges[0] == ("embed", "L0H0.q", -10.0, 5, None)
    (tmp_path / "other.json").write_text("{}")
    scores.to_dataset(name="scores").to_netcdf(tmp_path / "scores.nc", engine="h5netcdf")
    for name in ("other.json", "missing.nc", "scores.nc"):
        with pytest.raises(CheckpointError, match="holds no circuit"):
            Circuit.load(tmp_path / name)


def test_the_picture_has_every_edge_once_with_its_sign():
    text = Circuit.strongest(small(), share=1.0).to_dot()
    assert text.count("->") == 6
    assert '"embed" -> "L0H0" [penwidth=4.30, color="#2171b5", tooltip="5"];' in text
    assert '"embed" -> "0 MLP" [penwidth=3.50, color="#cb181d", tooltip="-4"];' in text
    assert text.startswith("digraph circuit {")
    assert text.endswith("}\n")


NODE = {  # circuit-tracer 0.5.0, circuit_tracer/frontend/graph_models.py; the first five have no default
    "node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str, "jsNodeId": str,
    "token_prob": float, "is_target_logit": bool, "run_idx": int, "reverse_ctx_idx": int, "clerp": str,
}  # fmt: skip
METADATA = {"slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list, "prompt": str}
PAGE = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}


def check_graph(data, tokens):
    """What circuit-tracer's models require, and what its page needs to place every node."""
    for content, wanted in [(data["metadata"], METADATA), (data["qParams"], PAGE), *((n, NODE) for n in data["nodes"])]:
        assert {name: type(content[name]) for name in wanted} == wanted
    assert data["metadata"]["prompt_tokens"] == tokens
    ids = [node["node_id"] for node in data["nodes"]]
    assert len(set(ids)) == len(ids)
    for link in data["links"]:
        assert {link["source"], link["target"]} <= set(ids)
        assert isinstance(link["weight"], float)
    for node in data["nodes"]:
        assert 0 <= node["ctx_idx"] < len(tokens)
        assert len(tokens) > 1  # the page drops nodes that occur at more than two thirds of the tokens
        assert node["feature_type"] == "logit" or "(p=" not in node["clerp"]
    assert all("(p=" in node["clerp"] for node in data["nodes"] if node["feature_type"] == "logit")


def linked(data):
    """(label of the sender, receiver, position, weight) of every link."""
    nodes = {node["node_id"]: node for node in data["nodes"]}
    found = []
    for link in data["links"]:
        source, target = nodes[link["source"]], nodes[link["target"]]
        assert source["ctx_idx"] == target["ctx_idx"]
        head = link["receiver"].split(".")[0].replace("_mlp_in", " MLP")
        assert target["clerp"] == ('Output "logits" (p=nan)' if head == "logits" else head)
        found.append((source["clerp"].replace(" MLP", "_mlp_out"), link["receiver"], source["ctx_idx"], link["weight"]))
    return sorted(found)


@pytest.mark.parametrize("by_position", [False, True])
def test_the_graph_for_circuit_tracer_has_every_edge_with_its_weight(by_position):
    model, (clean, other) = random_model(), neighbours()
    scores = edge_attribution(model, clean, other, bent, by_position=by_position)["effect"]
    circuit = Circuit.strongest(scores, share=0.2)
    tokens = [f"w{number}" for number in range(6)] if by_position else None
    data = circuit.to_graph(tokens, slug="planted-1", model="random")
    check_graph(data, tokens or ["", "every position"])
    wanted = [(edge.sender, edge.receiver, edge.pos if by_position else 1, edge.score) for edge in circuit.edges]
    assert linked(data) == sorted(wanted)
    assert len(wanted) > 20
    layers = {node["clerp"]: node["layer"] for node in data["nodes"]}
    assert (layers["embed"], layers['Output "logits" (p=nan)']) == ("E", "3")
    assert all(int(layer) == int(name.lstrip("L").split("H")[0].split()[0]) for name, layer in layers.items()
               if name != "embed" and "Output" not in name)  # fmt: skip


def test_a_folder_lists_its_graphs_once(tmp_path):
    scores = xr.concat([small(), -2 * small()], dim="step").assign_coords(step=[4, 7])
    circuit = Circuit.strongest(scores, share=1.0)
    for slug, step in (("a", 4), ("b", 4), ("a", 7)):
        path = circuit.save_graph(tmp_path / "graphs", slug=slug, step=step)
    listed = json.loads((tmp_path / "graphs" / "graph-metadata.json").read_text())
    assert [entry["slug"] for entry in listed["graphs"]] == ["b", "a"]
    assert path == tmp_path / "graphs" / "a.json"
    wanted = Circuit.strongest(-2 * small(), share=1.0).to_graph(slug="a")
    assert json.loads(path.read_text()) == wanted
    (tmp_path / "graphs" / "graph-metadata.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"graph-metadata\.json lists no graphs"):
        circuit.save_graph(tmp_path / "graphs", step=4)


def test_graphs_that_the_page_cannot_show_are_refused():
    scores = xr.concat([small(), small()], dim="step").assign_coords(step=[4, 7])
    with pytest.raises(SettingError, match=r"step must be one of \[4, 7\] for this circuit; got None"):
        Circuit.strongest(scores, share=1.0).to_graph()
    with pytest.raises(SettingError, match=r"step must be one of \[None\] for this circuit; got 4"):
        Circuit.strongest(small(), share=1.0).to_graph(step=4)
    with pytest.raises(SettingError, match=r"slug must consist of letters.*got '\.\./a'"):
        Circuit.strongest(small(), share=1.0).to_graph(slug="../a")
    placed = xr.concat([small(), small()], dim="pos").assign_coords(pos=[0, 1])
    with pytest.raises(SettingError, match=r"edges at position 1, so tokens must have .* at least 2 columns; got 1"):
        Circuit.strongest(placed, share=1.0).to_graph(["a"])


def test_a_case_is_shown_in_one_line():
    case = circuit_case(shared_model(), *neighbours(), bent)
    assert repr(case) == "CircuitCase(llama, step 0, 2 × 6 ids, of which 4 corrupted)"


def test_what_is_no_circuit_is_refused():
    with pytest.raises(SettingError, match="a circuit of these scores has 0 to 6 edges; got count=7"):
        Circuit.strongest(small(), count=7)
    with pytest.raises(SettingError, match="pass one of count= and share="):
        Circuit.strongest(small())
    with pytest.raises(SettingError, match="False where scores is NaN"):
        Circuit(~np.isnan(small()) | True, small())
    with pytest.raises(SettingError, match="the circuits have different edges to choose from"):
        Circuit.strongest(small(), count=1).overlap(Circuit.strongest(small()[:2], count=1))
    with pytest.raises(SettingError, match="kept must be boolean, over sender and receiver"):
        KeepEdges(kept=small(), source={})
    case = circuit_case(shared_model(), *neighbours(), lambda logits: logits.sum() * 0)
    with pytest.raises(SettingError, match="the metric is the same in the clean and in the corrupted passes"):
        measure_circuit([case], Circuit.strongest(small(), count=1))
    with pytest.raises(SettingError, match="pass at least one case"):
        edge_scores([])
    with pytest.raises(SettingError, match="tolerance must not be negative"):
        greedy_circuit([case], Circuit.strongest(small(), count=1), tolerance=-1.0)


def test_a_circuit_by_step_needs_each_case_once():
    case = circuit_case(shared_model(), *neighbours(), bent)
    circuit = Circuit.strongest(edge_scores([case, case]), share=0.1)
    with pytest.raises(SettingError, match=r"the circuit has steps \[0, 0\], and a case step 0"):
        measure_circuit([case], circuit)


def test_a_source_of_other_canvases_is_refused():
    model, (clean, _) = sinklens.load(random_hf()), neighbours()
    _, cache = model.run_with_cache(clean[:, :4])
    scores = edge_scores([circuit_case(model, clean, neighbours()[0], bent)])[0]
    hooks = Circuit.strongest(scores, count=3).alone({0: cache}).hooks_for(model)
    with pytest.raises(SettingError, match="KeepEdges needs a source of the same canvases"):
        model.run_with_hooks(clean, hooks)
