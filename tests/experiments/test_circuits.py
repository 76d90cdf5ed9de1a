"""Circuits: run alone as in plain torch, found where they were planted and not elsewhere, kept on disk, drawn."""

import json

import numpy as np
import pytest
import torch
import xarray as xr
from building import random_model, shared_model
from circuit_oracle import alone
from oracles import POINTS, bent, two_inputs

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.experiments import (
    Circuit,
    circuit_case,
    circuit_cases,
    corrupted,
    edge_attribution,
    edge_scores,
    greedy_circuit,
    measure_circuit,
)
from sinklens.interventions import Activations, KeepEdges

PLANTED = {"embed", "L0H1", "1_mlp_out"}, {"L0H1.q", "L0H1.k", "L0H1.v", "1_mlp_in", "logits"}


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


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("by_position", [True, False])
def test_a_random_circuit_alone_equals_plain_torch(by_position):
    model, (clean, other) = random_model(), two_inputs()
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


@pytest.mark.fast_cases(1)
def test_the_planted_circuit_is_found_faithful_and_complete_and_random_ones_are_not():
    planted_case = circuit_case(planted(), *two_inputs(), bent)
    scores = edge_scores(planted_case, ig_steps=4)[0]
    senders, receivers = (
        np.isin(scores[end], [*names]) for end, names in zip(("sender", "receiver"), PLANTED, strict=True)
    )
    truth = scores.copy(data=senders[:, None] & receivers) & ~np.isnan(scores)
    assert np.abs(scores.where(~truth)).max() == 0.0  # nothing outside it
    assert np.abs(scores.where(truth)).min() > 0.0
    circuit = Circuit.strongest(scores, count=int(truth.sum()))
    assert (circuit.kept == truth).all()
    value = measure_circuit(planted_case, circuit)
    assert (value.faithfulness, value.completeness) == pytest.approx((1.0, 1.0), abs=1e-5)
    none = measure_circuit([planted_case], Circuit.strongest(scores, count=0))
    assert (none.faithfulness, none.completeness) == pytest.approx((0.0, 0.0), abs=1e-5)
    assert (none.metric, none.full) == pytest.approx((value.empty, value.full), abs=1e-5)
    every = Circuit(scores.notnull(), scores)
    removed = greedy_circuit([planted_case], every, tolerance=1e-4, most=20)
    assert removed.size == every.size - 20
    assert (removed.kept | ~truth).all()  # none of the 20 weakest is planted
    needed = greedy_circuit(planted_case, circuit, tolerance=0.0)
    assert needed.size > 0
    assert measure_circuit([planted_case], needed).faithfulness >= 1.0 - 1e-5
    with pytest.warns(
        UserWarning, match=rf"removed all {circuit.size} edges, since none costs more faithfulness than toler"
    ):
        assert greedy_circuit([planted_case], circuit, tolerance=2.0).size == 0
    random = [measure_circuit([planted_case], circuit.random(seed)).faithfulness for seed in range(3)]
    assert np.abs(random).max() < 0.9


def test_scores_over_steps_and_positions_sum_to_those_of_one_pass(tiny_llada):
    prompt = "Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:"
    run = sinklens.generate(tiny_llada, prompt, gen_length=8, steps=4, record_sinks=False)
    cases = circuit_cases(run, {" 6": " 7"}, steps=[1, -1])
    assert [case.step for case in cases] == [1, 3]
    for case in cases:
        assert len((case.pair.clean != case.pair.corrupted).nonzero()) == 1
        assert torch.equal(case.pair.clean, run.canvas[:, case.step])
    by_position, total = edge_scores(cases, by_position=True), edge_scores(cases)
    np.testing.assert_allclose(by_position.sum("pos", skipna=False), total, atol=1e-5)
    assert by_position.sizes["pos"] == run.canvas.shape[2]


def test_a_run_keeps_the_circuit_at_the_steps_of_its_source(model):
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
    assert (circuit.share, circuit.complement().size) == (0.5, 3)
    assert repr(circuit) == "Circuit(3 of 6 edges)"


def test_random_circuits_have_the_size_of_the_circuit_and_other_edges():
    circuit = Circuit.strongest(edge_attribution(random_model(), *two_inputs(), bent)["effect"], share=0.1)
    first, again, other = (circuit.random(seed) for seed in (1, 1, 2))
    assert first.size == other.size == circuit.size
    assert (first.kept == again.kept).all()
    assert (first.kept & other.kept).sum() < circuit.size / 2
    assert (first.kept & circuit.kept).sum() < circuit.size / 2


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
    unnamed = xr.load_dataset(tmp_path / "circuit.nc", engine="h5netcdf").drop_vars("sender")
    unnamed.to_netcdf(tmp_path / "unnamed.nc", engine="h5netcdf")
    for name in ("other.json", "missing.nc", "scores.nc", "unnamed.nc"):
        with pytest.raises(CheckpointError, match=f"{name} holds no circuit"):
            Circuit.load(tmp_path / name)


def test_a_folder_lists_its_graphs_once(tmp_path):
    scores = xr.concat([small(), -2 * small()], dim="step").assign_coords(step=[4, 7])
    circuit = Circuit.strongest(scores, share=1.0)
    for slug, step in (("a", 4), ("b", 4), ("a", 7)):
        path = circuit.save_graph(tmp_path / "graphs", slug=slug, step=step)
    listed = json.loads((tmp_path / "graphs" / "graph-metadata.json").read_text())
    assert [entry["slug"] for entry in listed["graphs"]] == ["b", "a"]
    assert path == tmp_path / "graphs" / "a.json"
    assert json.loads(path.read_text()) == Circuit.strongest(-2 * small(), share=1.0).to_graph(slug="a")
    (tmp_path / "graphs" / "graph-metadata.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"graph-metadata\.json lists no graphs"):
        circuit.save_graph(tmp_path / "graphs", step=4)


NODE = {  # circuit-tracer 0.5.0, circuit_tracer/frontend/graph_models.py; the first five have no default
    "node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str, "jsNodeId": str,
    "token_prob": float, "is_target_logit": bool, "run_idx": int, "reverse_ctx_idx": int, "clerp": str,
}  # fmt: skip
METADATA = {"slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list, "prompt": str}
PAGE = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}


@pytest.mark.parametrize("by_position", [False, True])
def test_the_graph_for_circuit_tracer_has_every_edge_with_its_weight(by_position):
    """And what circuit-tracer's models require, and what its page needs to place every node."""
    scores = edge_attribution(shared_model(), *two_inputs(), bent, by_position=by_position)["effect"]
    circuit = Circuit.strongest(scores, share=0.2)
    tokens = [f"w{number}" for number in range(6)] if by_position else None
    data = circuit.to_graph(tokens, slug="planted-1", model="random")
    parts = [(data["metadata"], METADATA), (data["qParams"], PAGE), *((node, NODE) for node in data["nodes"])]
    for content, wanted in parts:
        assert {name: type(content[name]) for name in wanted} == wanted
    assert data["metadata"]["prompt_tokens"] == (tokens or ["", "every position"])
    nodes, found = {node["node_id"]: node for node in data["nodes"]}, []
    assert len(nodes) == len(data["nodes"])
    for node in data["nodes"]:
        assert 0 <= node["ctx_idx"] < 6
        assert (node["feature_type"] == "logit") == ("(p=" in node["clerp"])
    for link in data["links"]:
        source, target = nodes[link["source"]], nodes[link["target"]]
        head = link["receiver"].split(".")[0].replace("_mlp_in", " MLP")
        assert target["clerp"] == ('Output "logits" (p=nan)' if head == "logits" else head)
        assert source["ctx_idx"] == target["ctx_idx"]
        found.append((source["clerp"].replace(" MLP", "_mlp_out"), link["receiver"], source["ctx_idx"], link["weight"]))
    wanted = [(edge.sender, edge.receiver, edge.pos if by_position else 1, edge.score) for edge in circuit.edges]
    assert sorted(found) == sorted(wanted)
    assert len(wanted) > 20
    layers = {node["clerp"]: node["layer"] for node in data["nodes"]}
    assert (layers["embed"], layers['Output "logits" (p=nan)'], layers["1 MLP"]) == ("E", "3", "1")


def test_what_is_no_circuit_or_cannot_be_measured_or_shown_is_refused():
    model, strongest = shared_model(), Circuit.strongest
    case, flat = (circuit_case(model, *two_inputs(), metric) for metric in (bent, lambda logits: logits.sum() * 0))
    assert repr(case) == "CircuitCase(llama, step 0, 2 × 6 ids, of which 2 corrupted)"
    steps = xr.concat([small(), small()], dim="step").assign_coords(step=[4, 7])
    placed = xr.concat([small(), small()], dim="pos").assign_coords(pos=[0, 1])
    twice = strongest(edge_scores([case, case]), count=3)
    source = {0: model.run_with_cache(two_inputs()[0][:, :4])[1]}
    short = Circuit(twice.kept[0], twice.scores[0]).alone(source).hooks_for(model)
    for call, match in [
        (lambda: strongest(small(), count=7), "a circuit of these scores has 0 to 6 edges; got count=7"),
        (lambda: strongest(small()), "pass one of count= and share="),
        (lambda: Circuit(~np.isnan(small()) | True, small()), "False where scores is NaN"),
        (lambda: KeepEdges(kept=small(), source={}), "kept must be boolean, over sender and receiver"),
        (lambda: measure_circuit([flat], strongest(small(), count=1)), "the metric is the same in the clean and"),
        (lambda: edge_scores([]), "pass at least one case"),
        (lambda: greedy_circuit([case], strongest(twice.scores[0], count=0)), "the circuit to begin with has no edges"),
        (lambda: greedy_circuit([case], twice, tolerance=-1.0), "tolerance must be a finite number of at least 0"),
        (lambda: measure_circuit([case], twice), r"the circuit has steps \[0, 0\], and a case step 0"),
        (lambda: model.run_with_hooks(two_inputs()[0], short), "KeepEdges needs a source of the same canvases"),
        (lambda: strongest(steps, share=1.0).to_graph(), r"step must be one of \[4, 7\] for this circuit; got None"),
        (lambda: strongest(small(), share=1.0).to_graph(step=4), r"step must be one of \[None\] for .*; got 4"),
        (lambda: strongest(small(), share=1.0).to_graph(slug="../a"), r"slug must consist of letters.*got '\.\./a'"),
        (lambda: strongest(placed, share=1.0).to_graph(["a"]), r"position 1, so tokens must have .* 2 columns; got 1"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
