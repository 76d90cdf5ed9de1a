"""The pair: what becomes of a model's sinks in another, counted one by one, and keys measured head by head."""

import importlib

import numpy as np
import pytest
import torch
import xarray as xr

from sinklens.analyses.pair import TOKENS, Pair, fates, of_matched
from sinklens.analyses.passes import Read, TextCanvas, losses, read


def test_the_fate_of_every_sink_is_that_of_its_position_in_its_head_and_its_layer():
    """Of four texts; the share is over the sinks that both models see."""
    noise = np.random.default_rng(0)
    place = np.concatenate([np.zeros((4, 1)), noise.integers(1, 3, (4, 9))], axis=1)
    one, other = (
        xr.Dataset({"sinks": (("prompt", "layer", "head", "pos"), noise.random((4, 2, 3, 10)) < 0.5),
                    "masked": (("prompt", "pos"), (noise.random((4, 10)) < 0.3) & (place > 0)),
                    "place": (("prompt", "pos"), place)})
        for _ in range(2)
    )  # fmt: skip
    found, hidden = fates(one, other), (one["masked"] | other["masked"]).to_numpy()
    for text in range(4):
        counts = {token: np.zeros(4) for token in TOKENS}
        for layer, head, pos in zip(*np.nonzero(one["sinks"].to_numpy()[text]), strict=True):
            there, before = (other["sinks"].to_numpy()[which, layer, :, pos] for which in (text, text - 1))
            for token, places in TOKENS.items():
                if place[text, pos] in places and not hidden[text, pos]:
                    counts[token] += [there[head], there.any() and not there[head], before[head], 1]
        for token, (*ends, total) in counts.items():
            row = found.isel(prompt=text).sel(token=token)
            shares = [row[name].item() for name in ("same_head", "other_head", "another_text", "of_sinks")]
            np.testing.assert_allclose(shares, [*np.array(ends) / total, total / counts["any"][3]])


@torch.no_grad()
def test_keys_are_measured_in_every_layer_at_sinks_and_at_the_first_position(tiny_llada):
    """And the loss without the sinks of this layer alone."""
    canvas = TextCanvas(torch.arange(20, 40), torch.arange(20) > 12)
    plain = read(tiny_llada, canvas)
    found = Pair(epsilon=0.5)._of_canvas(tiny_llada, canvas, plain, np.random.default_rng(0))
    _, cache = tiny_llada.run_with_cache(canvas.tokens(tiny_llada)[None])
    for layer in (0, 3):
        query, key = (cache[f"blocks.{layer}.attn.hook_{name}"][0] for name in ("rot_q", "rot_k"))
        value = torch.einsum("phd,hdm->phm", cache[f"blocks.{layer}.attn.hook_v"][0], tiny_llada.blocks[layer].attn.W_O)
        sums = cache[f"blocks.{layer}.attn.hook_pattern"][0].sum(dim=-2)
        cosine = torch.nn.functional.cosine_similarity(query[:, None], key[None], dim=-1).mean(dim=0)
        writes = value.norm(dim=-1)
        naive = {
            "key_norm": key.norm(dim=-1),
            "query_norm": query.norm(dim=-1),
            "value_norm": writes,
            "no_ops": (writes < 0.2 * writes.median(dim=0).values).float(),
        }
        for of, chosen in (("sinks", sums > 1.5), ("first position", torch.arange(20).expand_as(sums) == 0)):
            heads = [head for head in range(len(sums)) if chosen[head].any()]
            for name, size in {**naive, "cosine": cosine}.items():
                pairs = [(size[chosen[head], head].mean(), size[~chosen[head], head].mean()) for head in heads]
                each = [
                    at - off if name == "cosine" else at if name == "no_ops" else (at / off).log2() for at, off in pairs
                ]
                assert found[name].sel(of=of)[layer].item() == pytest.approx(np.mean(each), abs=1e-4)
        hidden = torch.zeros(1, 4, *sums.shape, dtype=torch.bool)
        hidden[0, layer] = sums > 1.5
        alone = losses(tiny_llada, canvas, plain, hidden)[0]
        assert found["layer_cost"][layer].item() == pytest.approx(alone - plain.loss, abs=1e-6)


def test_sinks_are_compared_with_as_much_attention_only_in_heads_whose_other_keys_hold_it(tiny_llada, monkeypatch):
    """Key 3 receives 60, 30 and 8 % of the attention of three heads of two layers: a sink in two, matched in one."""
    pair, noise, hidden = importlib.import_module("sinklens.analyses.pair"), np.random.default_rng(0), []
    pattern = torch.from_numpy(noise.uniform(0.5, 1.5, (2, 3, 12, 12)))
    pattern[..., 3] = 0
    share = torch.tensor([0.6, 0.3, 0.08])[:, None]
    pattern *= (1 - share[..., None]) / pattern.sum(dim=-1, keepdim=True)
    pattern[..., 3] = share
    plain, canvas = Read(2.0, pattern, *[torch.empty(0)] * 5), TextCanvas(torch.arange(12), torch.arange(12) > 6)
    monkeypatch.setattr(pair, "losses", lambda model, canvas, plain, keys: hidden.extend(keys) or [4.0, 3.0])
    sinks = plain.sinks(causal=False, epsilon=1.0)
    found = of_matched(tiny_llada, canvas, plain, sinks, torch.from_numpy(noise.random(sinks.shape)))
    treated, others = hidden
    assert torch.nonzero(treated).tolist() == [[0, 1, 3], [1, 1, 3]]
    assert not (others & (sinks | (torch.arange(3) != 1)[:, None])).any()
    masses = [pattern[0, 1].fill_diagonal_(0).sum(dim=0)[keys[0, 1]].sum().item() for keys in (treated, others)]
    assert masses[1] == pytest.approx(masses[0], abs=pattern[0, 1].sum(dim=0).sort().values[-2].item() / 2)
    assert (found["matched_heads"], found["matched_cost"][1]) == (0.5, [2.0, 1.0, 1.0])
