"""Edge attribution against slopes of path patching, and path patching of edges against three plain passes."""

import numpy as np
import pytest
import torch
from building import left_padding, random_hf, random_ids, shared_model
from path_oracle import brute_force

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import Circuit, agreement, edge_attribution, path_patching_effects
from sinklens.interventions import PathPatch

EDGES = [
    ("embed", "L0H1.q"), ("embed", "logits"), ("L0H4", "L1H1.k"), ("L0H5", "L2H3.q"), ("L1H2", "L2H0.v"),
    ("0_mlp_out", "1_mlp_in"), ("L1H0", "1_mlp_in"), ("1_mlp_out", "L2H1.v"), ("2_mlp_out", "logits"),
]  # fmt: skip


def bent(logits):
    """A nonlinear metric."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weights * logits.log_softmax(dim=-1)).sum() / 50


def neighbours():
    """Two rows of ids, and the same with two tokens changed."""
    clean = random_ids(2, 6)
    corrupted = clean.clone()
    corrupted[0, 1], corrupted[1, 4] = (clean[0, 1] + 7) % 60, (clean[1, 4] + 11) % 60
    return clean, corrupted


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "causal", "padded"), [("qwen3", False, False), ("qwen2", True, True)])
def test_an_edge_has_the_slope_of_its_patch_towards_the_clean_pass(architecture, causal, padded):
    """Central differences of `PathPatch` with a source a little beside the corrupted pass, in double precision."""
    model = sinklens.load(random_hf(architecture, causal, dtype=torch.float64))
    (clean, corrupted), real = neighbours(), left_padding(2, 6, 2) if padded else None
    metric = bent if real is None else lambda logits: bent(torch.where(real[..., None], logits, 0.0))
    found = edge_attribution(model, clean, corrupted, metric, real)["effect"]
    caches = [model.run_with_cache(ids, attention_mask=real)[1] for ids in (clean, corrupted)]

    def towards(share, sender, receiver):
        names = ["hook_embed", *(f"blocks.{n}.{p}" for n in range(3) for p in ("attn.hook_z", "hook_mlp_out"))]
        source = {name: torch.lerp(caches[1][name], caches[0][name], share) for name in names}
        patch = PathPatch(sender=sender, receiver=receiver, source={0: source})
        with torch.no_grad():
            return metric(model.run_with_hooks(corrupted, patch.hooks_for(model), attention_mask=real)).item()

    for sender, receiver in EDGES:
        slope = (towards(1e-2, sender, receiver) - towards(-1e-2, sender, receiver)) / 2e-2
        assert found.sel(sender=sender, receiver=receiver).item() == pytest.approx(slope, rel=2e-2, abs=1e-5)
    assert np.isnan(found.sel(sender="L1H2", receiver="L1H0.q").item())


@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
def test_true_effects_of_edges_equal_plain_passes():
    model, (clean, corrupted) = shared_model("qwen3"), neighbours()
    senders, receivers = ["embed", "L0H4", "1_mlp_out"], ["L1H1.k", "2_mlp_in", "logits"]
    found = path_patching_effects(model, clean, corrupted, bent, senders=senders, receivers=receivers)
    with torch.no_grad():
        base = bent(model.tree.hf(corrupted).logits)
        for sender in senders:
            for receiver in receivers:
                effect = found["effect"].sel(sender=sender, receiver=receiver).item()
                if (sender, receiver) == ("1_mlp_out", "L1H1.k"):
                    assert np.isnan(effect)
                    continue
                expected = bent(brute_force(model, corrupted, clean, sender, receiver)) - base
                assert effect == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
def test_stacked_edges_equal_separate_patches():
    """Of padded rows too, whatever the number of edges in a pass."""
    model, (clean, corrupted), real = shared_model("qwen3"), neighbours(), left_padding(2, 6, 2)
    metric = lambda logits: bent(torch.where(real[..., None], logits, 0.0))  # noqa: E731
    labels = {
        "senders": ["embed", "L0H4", "1_mlp_out"],
        "receivers": ["L0H1.q", "L1H1.k", "L2H0.v", "2_mlp_in", "logits"],
    }
    asked = model, clean, corrupted, metric, real
    found = [path_patching_effects(*asked, **labels, edges_per_pass=size)["effect"] for size in (1, 4, None)]
    _, cache = model.run_with_cache(clean, attention_mask=real)
    with torch.no_grad():
        base = metric(model(corrupted, attention_mask=real))
        for sender, receiver in ((one, other) for one in labels["senders"] for other in labels["receivers"]):
            effects = [one.sel(sender=sender, receiver=receiver).item() for one in found]
            if np.isnan(effects[0]):
                assert np.isnan(effects).all()
                continue
            patch = PathPatch(sender=sender, receiver=receiver, source={0: dict(cache)})
            apart = metric(model.run_with_hooks(corrupted, patch.hooks_for(model), attention_mask=real)) - base
            assert effects == pytest.approx([apart.item()] * 3, abs=1e-5)
    assert np.isfinite(found[0].values).sum() == 12


def test_a_budget_below_one_edge_is_refused():
    with pytest.raises(SettingError, match=r"one row takes about .* GB; the budget is 1e-06 GB\. Increase memory_gb\."):
        path_patching_effects(shared_model(), *neighbours(), bent, memory_gb=1e-6)
    with pytest.raises(SettingError, match="edges_per_pass must be at least 1; got 0"):
        path_patching_effects(shared_model(), *neighbours(), bent, edges_per_pass=0)


def test_strongest_edges_are_sorted_by_size():
    found = edge_attribution(shared_model(), *neighbours(), bent)
    edges = Circuit.strongest(found, count=5).edges
    sizes = np.sort(np.abs(found["effect"].values[~np.isnan(found["effect"].values)]))[::-1]
    assert [abs(edge.score) for edge in edges] == pytest.approx(sizes[:5])
    assert found["effect"].sel(sender=edges[0].sender, receiver=edges[0].receiver).item() == edges[0].score


@pytest.mark.extended
def test_gradients_along_the_path_rank_the_edges_of_a_trained_model_as_path_patching(tiny_llada):
    """The edges between the heads of layers 0 and 1, where the number is passed on."""
    prompt = "Question: Mia has 17 pens. She loses {} of them. How many pens are left?\nAnswer:"
    run = sinklens.generate(tiny_llada, prompt.format(6), record_sinks=False)
    other = run.canvas[:, 20].clone()
    six, eight = (tiny_llada.to_single_token(text) for text in (" 6", " 8"))
    other[:, : run.prompt_length][other[:, : run.prompt_length] == six] = eight

    def metric(logits):
        place = (run.undecided[0, 20]).nonzero()[0, 0]
        return logits[0, place].log_softmax(-1)[run.canvas[0, -1, place]]

    asked = tiny_llada, run.canvas[:, 20], other, metric
    labels = {
        "senders": [f"L0H{head}" for head in range(6)],
        "receivers": [f"L1H{head}.{letter}" for head in range(6) for letter in "qkv"],
    }
    truth = path_patching_effects(*asked, **labels)
    scores = [agreement(edge_attribution(*asked, path=path), truth)["effect"] for path in (0, 8)]
    assert scores[1].rank_correlation > 0.8
    assert scores[1].places == 108


def test_a_model_without_direct_paths_is_refused(monkeypatch):
    from dataclasses import replace

    model = shared_model()
    monkeypatch.setattr(model.tree, "architecture", replace(model.tree.architecture, ln1_post="norm"))
    with pytest.raises(SettingError, match="normalizes what its sublayers read or write, so there is no direct path"):
        edge_attribution(model, *neighbours(), bent)
