"""Features as the file that Neuronpedia imports.

SAEDashboard writes the features of an SAE to ``batch-0.json``, ``batch-1.json`` and so on, which its
``neuronpedia_export`` turns into an upload (`NeuronpediaDashboardBatch` in ``neuronpedia/neuronpedia_dashboard.py``).
`save_neuronpedia` writes one such file. What sinklens does not measure is left as an empty list, as in SAEDashboard:
alignment with neurons, correlations with neurons and other features, and a split of the decoder by head.

Pitfall: Neuronpedia has no denoising steps. An example is the canvas of one step, with the text of the mask token at
undecided positions, and a share counts each position once for each step.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinklens.errors import SettingError
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.places import Scope
from sinklens.features.reading import FeatureSummary, summarize_features
from sinklens.model import Model
from sinklens.runs.result import Generation
from sinklens.utils.arguments import as_tuple, checked
from sinklens.utils.atomic import write_file

BINS, LOGITS = 50, 10
TABLES = [
    "neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1", "correlated_neurons_indices",
    "correlated_neurons_l1", "correlated_neurons_pearson", "correlated_features_indices", "correlated_features_l1",
    "correlated_features_pearson", "decoder_weights_dist",
]  # fmt: skip


@checked
@torch.no_grad()
def save_neuronpedia(
    runs: "Generation | Sequence[Generation]",
    sae: SparseAutoencoder,
    features: Sequence[int],
    out: str | Path,
    *,
    sae_set: str,
    model_id: str | None = None,
    dataset: str = "",
    scope: Scope = "all",
    top: int = 20,
) -> None:
    """Write features to a file that Neuronpedia imports: top examples, histograms, and the logits that they raise most.

    The effect of feature f on the logits is W_dec[f] times the final norm's weight times W_U, as SAEDashboard computes
    it from folded weights.

    Args:
        runs: one or several finished runs of one diffusion model.
        sae: an SAE of the residual stream, or of what attention or an MLP adds to it.
        features: indices of features; negative ones count from the end.
        out: the file, such as "batch-0.json".
        sae_set, model_id: names on Neuronpedia; by default the model has its own.
        dataset: name of the data set of the prompts.
        scope: as in `read_features`.
        top: number of examples per feature.

    Raises:
        SettingError: no run, a feature that does not exist, or an SAE of another point.
    """
    layer = re.fullmatch(r"blocks\.(\d+)\.hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out)", sae.point)
    if layer is None:
        raise SettingError(
            f"the SAE is of {sae.point or 'no point'}, and Neuronpedia shows what a feature adds to the logits; pass "
            f"one of a layer's residual stream, hook_attn_out or hook_mlp_out."
        )
    runs = as_tuple(runs)
    summaries, model = summarize_features(runs, sae, sae.point, features, scope=scope, top=top), runs[0].model
    directions = model.tokens_to_residual_directions(torch.arange(model.cfg.d_vocab)).float().cpu()
    about = {
        "n_prompts_total": sum(len(run.real) for run in runs),
        "n_tokens_in_prompt": max(run.canvas.shape[2] for run in runs),
        "dataset": dataset,
    }
    content = {
        "model_id": model_id or model.name.rpartition("/")[2],
        "layer": int(layer[1]),
        "sae_set": sae_set,
        "features": [
            _feature(model, one, (directions @ sae.W_dec[one.feature].float().cpu()).numpy()) | about
            for one in summaries
        ],
    }
    write_file(out, json.dumps(content, allow_nan=False))


def _feature(model: "Model", one: FeatureSummary, logits: np.ndarray) -> dict[str, Any]:
    order = logits.argsort(kind="stable")
    found: dict[str, Any] = {"feature_index": one.feature, "frac_nonzero": one.share} | {name: [] for name in TABLES}
    for sign, tokens in (("neg", order[:LOGITS]), ("pos", order[::-1][:LOGITS])):
        found |= {f"{sign}_str": model.to_str_tokens(tokens.tolist()), f"{sign}_values": logits[tokens].tolist()}
    for name, values in (("freq", one.fired), ("logits", logits)):
        heights, edges = np.histogram(values, BINS) if len(values) else (np.array([]), np.zeros(1))
        found[f"{name}_hist_data_bar_heights"] = heights.tolist()
        found[f"{name}_hist_data_bar_values"] = ((edges[1:] + edges[:-1]) / 2).tolist()
    found["activations"] = [
        {
            "bin_min": -1.0,  # with bin_contains = -1: the top activations
            "bin_max": one.examples[0].value if one.examples else 0.0,
            "bin_contains": -1.0,
            "tokens": model.to_str_tokens(example.tokens),
            "values": np.nan_to_num(example.values).tolist(),
            "qualifying_token_index": example.place,
        }
        for example in one.examples
    ]
    return found
