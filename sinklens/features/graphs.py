"""A graph of features: what feeds a feature, and what it does to a metric, at one denoising step.

Each SAE reads the residual stream x at its layer; f = encode(x), and feature n writes f_n d_n, where d_n is its
direction in decode. A link from feature n at position i to a feature m at position j of the next SAE has the weight

    f_n d_n · ∂f_m[j] / ∂x[i],

to first order what f_m loses without feature n (Marks et al., 2403.19647). Everything passes from one SAE to the next
through the stream, so that only SAEs next to each other are linked. Features of the first SAE are linked to the
embeddings, x[i] · ∂f_m[j] / ∂x[i], and those of the last to the metric. The graph has the features with the largest
effects on the metric, f_n d_n · ∂metric / ∂x[i], of either sign.

Pitfall: what an SAE misses, x − decode(f), is not a node, so the weights into a feature do not add up to its value. And
where attention is saturated, a gradient is small although the cause matters; ablate the feature (`SpliceSAE`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.experiments.attribution import EMBED, LogitMetric, Pair, differentiable, metric_value
from sinklens.experiments.circuit_pictures import document, node, save_graph
from sinklens.experiments.step_ids import exact_step
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.runs.intervention import within
from sinklens.runs.result import Generation
from sinklens.utils.arguments import Count, as_tuple, checked, read_as


@checked
def save_feature_graph(
    run: "Generation",
    step: int,
    saes: SparseAutoencoder | Sequence[SparseAutoencoder],
    metric: LogitMetric,
    out: str | Path,
    *,
    row: int = 0,
    top: int = 50,
    slug: str = "features",
) -> Path:
    """Write the features that matter most for a metric at one step as a graph that circuit-tracer's page shows.

    The pass is that of the unchanged model over the canvas of the step, without padding.

    Args:
        run: a finished run.
        step, row: indices; negative numbers count from the end.
        saes: SAEs of ``hook_resid_pre`` or ``hook_resid_post``, one for each of some layers.
        metric: logits [1, pos, vocab] of the row -> a tensor with one number, as in `attribution_patching`.
        out: the folder where circuit-tracer looks for graphs, as in `Circuit.save_graph`.
        top: number of features at a position.
        slug: name of the graph, of letters, digits, ``-`` and ``_``.

    Returns:
        The file.

    Raises:
        SettingError: a step or row that does not exist; SAEs of other points, or two of one layer; or a metric that
            does not return one number or has no gradient.
    """
    saes, model = as_tuple(saes), run.model
    ids, real, time = exact_step(run, step).row(within("row", [row], len(run.real))[0])
    placed = sorted((_layer(sae), number) for number, sae in enumerate(saes))
    layers, saes = [layer for layer, _ in placed], [saes[number] for _, number in placed]
    require(saes and len(set(layers)) == len(saes), f"pass one SAE for each of some layers; got layers {layers}.")
    tokens, links = model.to_str_tokens(ids[0]), []
    words = [node("E", int(token), at, "embedding", tokens[at]) for at, token in enumerate(ids[0])]
    goal = node(str(layers[-1] + 1), 0, len(tokens) - 1, "logit", 'Output "metric" (p=nan)')
    with differentiable(model), torch.enable_grad():
        pair = Pair(model, ids, ids, real, time)
        values, logits = pair.values(ids, [EMBED, *(sae.point for sae in saes)], leaves=True)
        number = metric_value(metric, logits)
        require(number.requires_grad, "the metric has no gradient; compute it from the logits with torch operations.")
        streams = [values[EMBED], *(values[sae.point] for sae in saes)]
        features = [sae.encode(stream[0]) for sae, stream in zip(saes, streams[1:], strict=True)]
        slopes = torch.autograd.grad(number, streams[1:], retain_graph=True, materialize_grads=True)
        effects = [_parts(*one) for one in zip(saes, features, slopes, strict=True)]
        shown = _strongest(effects, read_as(Count, "top", top))
        made = [
            {
                (at, one): node(str(layer), one, at, "sae feature", f"{sae.point} {one}")
                | {"activation": values[at, one].item()}
                for at, one in places
            }
            for sae, layer, values, places in zip(saes, layers, features, shown, strict=True)
        ]
        for level, targets in enumerate(made):
            below: dict[Any, Any] = made[level - 1] if level else dict(enumerate(words))
            for (at, one), target in targets.items():
                slope = torch.autograd.grad(features[level][at, one], streams[level], retain_graph=True)[0]
                own = _parts(saes[level - 1], features[level - 1], slope) if level else (streams[0] * slope)[0].sum(-1)
                links += [(source, target, own.detach()[place]) for place, source in below.items()]
    links += [(source, goal, effects[-1][place]) for place, source in made[-1].items()]
    nodes = [*words, *(one for level in made for one in level.values()), goal]
    links = [link for link in links if link[2]]
    return save_graph(document(nodes, links, tokens, slug, model.name), Path(out))


def _layer(sae: SparseAutoencoder) -> int:
    found = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", sae.point)
    if found is None:
        raise SettingError(
            f"an SAE is of {sae.point or 'no point'}; a graph of features takes SAEs of hook_resid_pre or "
            f"hook_resid_post, through which everything passes from one layer to the next."
        )
    return int(found[1])


def _parts(
    sae: SparseAutoencoder, features: Float[Tensor, "pos feature"], slope: Float[Tensor, "1 pos d_in"]
) -> Float[Tensor, "pos feature"]:
    """f_n d_n · slope, for every feature at every position."""
    fresh = features.detach().requires_grad_()
    decoded = sae.decode(fresh)
    return fresh.detach() * torch.autograd.grad(decoded, fresh, slope[0].to(decoded))[0]


def _strongest(effects: Sequence[Float[Tensor, "pos feature"]], top: int) -> list[list[tuple[int, int]]]:
    """The places with the largest effects of all levels, by level."""
    every = torch.cat([effect.abs().flatten() for effect in effects])
    kept = every >= max(float(every.topk(min(top, len(every))).values[-1]), 1e-30)
    masks = kept.split([effect.numel() for effect in effects])
    pairs = [mask.view(effect.shape).nonzero().tolist() for mask, effect in zip(masks, effects, strict=True)]
    return [[(at, one) for at, one in level] for level in pairs]
