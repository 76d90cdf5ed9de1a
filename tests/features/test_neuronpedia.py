"""The file for Neuronpedia has the fields that SAEDashboard writes, with what a run and the SAE's weights say."""

import json

import numpy as np
import pytest
from planted_saes import random_sae

import sinklens
from sinklens.errors import SettingError
from sinklens.features import load_sae, read_features, save_neuronpedia
from sinklens.tasks import held_out

ACTIVATION = {
    "bin_min": float, "bin_max": float, "bin_contains": float, "tokens": [str], "values": [float],
    "qualifying_token_index": int,
}  # fmt: skip
FEATURE = {
    "feature_index": int, "neuron_alignment_indices": [int], "neuron_alignment_values": [float],
    "neuron_alignment_l1": [float], "correlated_neurons_indices": [int], "correlated_neurons_l1": [float],
    "correlated_neurons_pearson": [float], "correlated_features_indices": [int], "correlated_features_l1": [float],
    "correlated_features_pearson": [float], "neg_str": [str], "neg_values": [float], "pos_str": [str],
    "pos_values": [float], "frac_nonzero": float, "freq_hist_data_bar_values": [float],
    "freq_hist_data_bar_heights": [int], "logits_hist_data_bar_heights": [int], "logits_hist_data_bar_values": [float],
    "n_prompts_total": int, "n_tokens_in_prompt": int, "dataset": str, "activations": [ACTIVATION],
    "decoder_weights_dist": [float],
}  # fmt: skip
BATCH = {"model_id": str, "layer": int, "sae_set": str, "features": [FEATURE]}
"""`to_dict` of SAEDashboard's neuronpedia_dashboard.py at 234ea32; the heights of its histograms are counts."""


def check(value, wanted):
    """That `value` has exactly the fields and the types of `wanted`."""
    if isinstance(wanted, dict):
        assert value.keys() == wanted.keys()
        for name, kind in wanted.items():
            check(value[name], kind)
    elif isinstance(wanted, list):
        assert type(value) is list
        for one in value:
            check(one, wanted[0])
    else:
        assert type(value) is wanted


def test_the_export_of_a_shipped_sae_has_the_published_fields_and_the_values_of_its_run(tiny_llada, tmp_path):
    sae = load_sae("tiny-llada-masked")
    run = sinklens.generate(tiny_llada, [problem.prompt for problem in held_out(2)], steps=4)
    found = read_features(run, sae, sae.point, scope="masked").to_numpy()
    known = found[~np.isnan(found[..., 0])]
    order = (known > 0).sum(0).argsort()
    chosen = [int(order[-1]), int(order[len(order) // 2]), int(order[0])]
    about = {"sae_set": "masked", "dataset": "word problems"}
    save_neuronpedia(run, sae, chosen, tmp_path / "batch-0.json", **about, scope="masked", top=3)
    batch = json.loads((tmp_path / "batch-0.json").read_text())
    check(batch, BATCH)
    assert (batch["model_id"], batch["layer"], batch["sae_set"]) == ("tiny-llada", 2, "masked")
    assert [feature["feature_index"] for feature in batch["features"]] == chosen
    for number, feature in zip(chosen, batch["features"], strict=True):
        fires = known[:, number] > 0
        assert feature["frac_nonzero"] == pytest.approx(fires.mean())
        assert sum(feature["freq_hist_data_bar_heights"]) == fires.sum()
        logits = tiny_llada.W_U.T @ (tiny_llada.ln_final.w * sae.W_dec[number])
        assert feature["pos_values"] == pytest.approx(logits.topk(10).values.tolist(), abs=1e-5)
        assert feature["neg_str"][0] == tiny_llada.to_single_str_token(int(logits.argmin()))
        assert sum(feature["logits_hist_data_bar_heights"]) == tiny_llada.cfg.d_vocab
        assert (feature["n_prompts_total"], feature["n_tokens_in_prompt"]) == (2, run.canvas.shape[2])
        assert len(feature["activations"]) == min(3, (found[..., number] > 0).any(axis=1).sum())
        for example in feature["activations"]:
            assert len(example["tokens"]) == len(example["values"])
            assert example["bin_max"] == pytest.approx(known[:, number].max())
        if fires.any():
            best = feature["activations"][0]
            assert best["values"][best["qualifying_token_index"]] == best["bin_max"]
    assert any("<|mdm_mask|>" in example["tokens"] for example in batch["features"][0]["activations"])


@pytest.mark.parametrize("point", ["hook_embed", "blocks.1.attn.hook_z", ""])
def test_an_sae_whose_features_are_not_added_to_the_stream_of_a_layer_is_refused(tmp_path, point):
    with pytest.raises(SettingError, match=rf"the SAE is of {point or 'no point'}, and Neuronpedia shows"):
        save_neuronpedia([], random_sae(point=point), [0], tmp_path / "batch-0.json", sae_set="a")
