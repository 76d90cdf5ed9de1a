"""The graphs of a circuit that circuit-tracer's page shows.

circuit-tracer (Hanna et al., 2025; `circuit_tracer.frontend` of version 0.5.0) stores a graph as JSON: ``nodes`` with a
layer and a position, ``links`` with a weight, ``metadata`` and the state of the page in ``qParams``. Its nodes are
features of transcoders; here they are heads, MLPs, the embedding and the logits, or features of SAEs.

Pitfall: the page drops a node that occurs at more than two thirds of the tokens, so a graph of a single token is empty.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sinklens.errors import CheckpointError, SettingError, require
from sinklens.utils.atomic import write_file
from sinklens.utils.documents import read_json

EVERYWHERE = ["", "every position"]
"""Tokens of a graph without positions; all nodes are at the second."""
TYPES = {"embed": "embedding", "head": "attention head", "mlp": "mlp", "logits": "logit"}
LISTED = "graph-metadata.json"


class CircuitEdge(NamedTuple):
    """An edge of a circuit.

    Attributes:
        sender, receiver: labels, as in `PathPatch`.
        score: its score; NaN without scores.
        step, pos: where it is kept; None for everywhere.
    """

    sender: str
    receiver: str
    score: float
    step: int | None = None
    pos: int | None = None


def graph(edges: "Sequence[CircuitEdge]", tokens: "Sequence[str] | None", slug: str, model: str) -> dict[str, Any]:
    last = max((edge.pos for edge in edges if edge.pos is not None), default=None)
    if last is not None and (tokens is None or len(tokens) <= max(last, 1)):
        raise SettingError(
            f"the circuit has edges at position {last}, so tokens must have the text of each of at least "
            f"{max(last, 1) + 1} columns; got {'none' if tokens is None else len(tokens)}."
        )
    pairs = [(_component(edge.sender), _component(edge.receiver), edge.pos) for edge in edges]
    names = {(name, pos) for sender, receiver, pos in pairs for name in (sender, receiver)}
    depth = 1 + max((_rank(name)[0] for name, _ in names if _kind(name) != "logits"), default=-1)
    nodes = {
        (name, pos): _graph_node(name, pos, depth)
        for name, pos in sorted(names, key=lambda place: (_rank(place[0]), place))
    }
    links = [
        (nodes[sender, pos], nodes[receiver, pos], edge.score)
        for edge, (sender, receiver, pos) in zip(edges, pairs, strict=True)
    ]
    data = document([*nodes.values()], links, EVERYWHERE if last is None else list(tokens or ()), slug, model)
    data["metadata"]["prompt"] = "".join(tokens or ())
    for link, edge in zip(data["links"], edges, strict=True):
        link["receiver"] = edge.receiver
    return data


def document(
    nodes: "Sequence[dict[str, Any]]",
    links: "Sequence[tuple[dict[str, Any], dict[str, Any], Any]]",
    tokens: list[str],
    slug: str,
    model: str,
) -> dict[str, Any]:
    """A graph of nodes (see `node`) and links (source, target, weight).

    Raises:
        SettingError: an invalid slug.
    """
    require(
        re.fullmatch(r"[\w-]+", slug),
        f"slug must consist of letters, digits, - and _, as it names a file; got {slug!r}.",
    )
    about = {
        "slug": slug,
        "scan": model,
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": "".join(tokens),
        "node_threshold": None,
        "schema_version": 1,
    }
    page = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    listed = [
        {"source": source["node_id"], "target": target["node_id"], "weight": float(weight)}
        for source, target, weight in links
    ]
    return {"metadata": about, "qParams": page, "nodes": [*nodes], "links": listed}


def save_graph(data: dict[str, Any], folder: Path) -> Path:
    """Write a graph, and list it beside the others of its folder."""
    listed, about = folder / LISTED, data["metadata"]
    try:
        graphs = read_json(listed)["graphs"] if listed.exists() else []
        others = [entry for entry in graphs if entry["slug"] != about["slug"]]
    except (CheckpointError, KeyError, TypeError) as error:
        raise CheckpointError(f"{listed} lists no graphs: {error!r}. Choose another folder.") from error
    path = folder / f"{about['slug']}.json"
    for file, content in {path: data, listed: {"graphs": [*others, about]}}.items():
        write_file(file, json.dumps(content, indent=2, allow_nan=False))
    return path


def _graph_node(name: str, pos: int | None, depth: int) -> dict[str, Any]:
    """A component as a node of circuit-tracer; the logits are in layer `depth`."""
    kind, at = _kind(name), 1 if pos is None else pos
    layer = {"embed": "E", "logits": str(depth)}.get(kind) or str(_rank(name)[0])
    number = int(name[name.index("H") + 1 :]) if kind == "head" else -1 if kind == "mlp" else 0
    return node(layer, number, at, TYPES[kind], f'Output "{name}" (p=nan)' if kind == "logits" else name)


def node(layer: str, number: int, at: int, kind: str, label: str) -> dict[str, Any]:
    """A node at position `at`; `layer` is "E" for embeddings."""
    return {
        "node_id": f"{layer}_{number}_{at}",
        "feature": number,
        "layer": layer,
        "ctx_idx": at,
        "feature_type": kind,
        "token_prob": 0.0,
        "is_target_logit": kind == TYPES["logits"],
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{layer}_{number}-0",
        "clerp": label,
        "influence": None,
        "activation": None,
    }


def _component(label: str) -> str:
    """The component that a sender or receiver belongs to: a head for its queries, keys and values."""
    return re.sub("_mlp_(in|out)$", " MLP", label.partition(".")[0])


def _kind(name: str) -> str:
    return name if name in ("embed", "logits") else "mlp" if name.endswith("MLP") else "head"


def _rank(name: str) -> tuple[int, int]:
    """Where a component is in the pass."""
    kind = _kind(name)
    if kind in ("embed", "logits"):
        return (-1, 0) if kind == "embed" else (1_000_000, 0)
    return (int(name.split()[0]), 1) if kind == "mlp" else (int(name[1 : name.index("H")]), 0)
