"""The graph of features: its weights are slopes of the model's own passes, and its form is circuit-tracer's."""

import itertools
import json

import pytest
import torch
from planted_saes import random_sae
from watching import PADDED, short

import sinklens
from sinklens.errors import SettingError
from sinklens.features import save_feature_graph

POINTS = ["blocks.1.hook_resid_pre", "blocks.2.hook_resid_post"]


def metric(logits):
    return logits[0, 1, 7] - logits[0, 2].logsumexp(-1)


@pytest.mark.parametrize(
    ("architecture", "causal", "kind"),
    [("llama", False, "standard"), ("dream", False, "topk"), ("llama", True, "topk")],
)
def test_weights_are_slopes_of_a_pass_along_the_direction_of_a_feature(worded, tmp_path, architecture, causal, kind):
    model, saes = worded(architecture, causal), [random_sae(architecture=kind, point=point) for point in POINTS]
    run = sinklens.generate(model, PADDED, **short(model, {}))
    path = save_feature_graph(run, 1, saes[::-1], metric, tmp_path, row=0, top=12, slug="a")
    graph, listed = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "graph-metadata.json"))
    assert (path, listed["graphs"]) == (tmp_path / "a.json", [graph["metadata"]])
    real = run.real[0, : run.prompt_length + 1 if causal else None]
    ids = run.canvas[:1, 1, : len(real)][:, real]
    assert graph["metadata"]["prompt_tokens"] == model.to_str_tokens(ids[0])

    def read(name=None, at=0, add=0.0):
        """The features of both SAEs, and the metric, with `add` at a position of a point."""
        hooks = [] if name is None else [(name, lambda value, hook: torch.cat(
            [value[:, :at], value[:, at : at + 1] + add, value[:, at + 1 :]], dim=1))]  # fmt: skip
        seen = {}
        hooks += [(sae.point, lambda value, hook: seen.update({hook.name: value})) for sae in saes]
        with torch.no_grad():
            logits = model.run_with_hooks(ids, fwd_hooks=hooks)
        if architecture == "dream":
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        return [sae.encode(seen[sae.point][0]) for sae in saes], metric(logits)

    nodes = {one["node_id"]: one for one in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) == ids.shape[1] + 12 + 1
    (values, _), embedded = read(), model.run_with_cache(ids, names_filter="hook_embed")[1]["hook_embed"][0]
    level, links = {"1": 0, "2": 1}, {}
    for link in sorted(graph["links"], key=lambda link: -abs(link["weight"])):
        links.setdefault((nodes[link["source"]]["layer"], nodes[link["target"]]["layer"]), []).append(link)
    assert links.keys() == {("E", "1"), ("1", "2"), ("2", "3")}
    for link in itertools.chain.from_iterable(strongest[:4] for strongest in links.values()):
        source, target = nodes[link["source"]], nodes[link["target"]]
        at, number = source["ctx_idx"], source["feature"]
        name, step = "hook_embed", embedded[at]
        if source["layer"] != "E":
            of = level[source["layer"]]
            name, step = POINTS[of], values[of][at, number] * saes[of].W_dec[number]
            assert source["activation"] == pytest.approx(float(values[of][at, number]), rel=1e-4)
        (more, up), (less, down) = (read(name, at, sign * 1e-3 * step) for sign in (1, -1))
        if target["feature_type"] != "logit":
            of, place = level[target["layer"]], (target["ctx_idx"], target["feature"])
            up, down = more[of][place], less[of][place]
        assert link["weight"] == pytest.approx(float(up - down) / 2e-3, rel=0.05, abs=2e-3)


def test_what_makes_no_graph_is_refused(worded, tmp_path):
    run = sinklens.generate(worded(), "w7 w12", gen_length=2, steps=2, record_sinks=False)
    first, second = (random_sae(point=point) for point in ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"))
    for saes, answer, match in [
        (
            [random_sae(point="blocks.1.hook_mlp_out")],
            metric,
            "an SAE is of blocks.1.hook_mlp_out; a graph of features",
        ),
        ([first, second], metric, r"pass one SAE for each of some layers; got layers \[1, 1\]"),
        ([], metric, r"got layers \[\]"),
        (first, lambda logits: logits.detach().sum(), "the metric has no gradient"),
    ]:
        with pytest.raises(SettingError, match=match):
            save_feature_graph(run, 0, saes, answer, tmp_path)
