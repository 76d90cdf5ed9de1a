"""The study of texts: passes by hand, and planted sinks that cost more than their attention, or just as much."""

import importlib

import numpy as np
import pytest
import torch

from sinklens.analyses.texts import CHOICES, KINDS, Texts, read, uniform
from sinklens.errors import SettingError
from sinklens.tasks.word_problems import held_out

module = importlib.import_module("sinklens.analyses.texts")
PROBLEMS = [problem.prompt for problem in held_out(12)]


def test_uniform_attention_gives_later_keys_less_only_if_they_are_seen_by_fewer_queries():
    torch.testing.assert_close(uniform(5, causal=False), torch.ones(5))
    naive = [sum(1 / (query + 1) for query in range(key, 5)) for key in range(5)]
    torch.testing.assert_close(uniform(5, causal=True), torch.tensor(naive))


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_a_pass_with_hidden_keys_is_one_whose_attention_is_divided_among_the_others(name, toy):
    model = toy(name)
    ids = model.encode(PROBLEMS[0])[0][0]
    masked = torch.zeros(len(ids), dtype=torch.bool)
    masked[5:9] = not model.causal
    canvas = ids.masked_fill(masked, model.mask_token_id or 0)
    hidden = (
        torch.rand(model.cfg.n_layers, model.cfg.n_heads, len(ids), generator=torch.Generator().manual_seed(0)) < 0.2
    )

    def rescale(pattern, hook):
        layer = int(hook.name.split(".")[1])
        for head in range(model.cfg.n_heads):
            for query in range(len(ids)):
                for key in range(len(ids)):
                    if hidden[layer, head, key] and key != query:
                        pattern[0, head, query, key] = 0
        return pattern / pattern.sum(dim=-1, keepdim=True)

    points = [(f"blocks.{layer}.attn.hook_pattern", rescale) for layer in range(model.cfg.n_layers)]
    logits = model.run_with_hooks(canvas[None], fwd_hooks=points)[0].double()
    predicted = range(1, len(ids)) if model.causal else [at for at in range(len(ids)) if masked[at]]
    losses = [-logits[at - model.causal].log_softmax(-1)[ids[at]].item() for at in predicted]
    assert read(model, ids, canvas, masked, hidden).loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert read(model, ids, canvas, masked).loss != pytest.approx(np.mean(losses), abs=1e-4)


def test_what_a_value_writes_is_its_part_of_the_output(tiny_llada):
    ids = tiny_llada.encode(PROBLEMS[0])[0][0]
    found = read(tiny_llada, ids, ids, torch.ones(len(ids), dtype=torch.bool)).writes
    _, cache = tiny_llada.run_with_cache(ids[None])
    value, weight = cache["blocks.1.attn.hook_v"][0], tiny_llada.blocks[1].attn.W_O
    for head, key in ((0, 3), (5, 20)):
        of_head = value[key, head * value.shape[1] // len(weight)]
        assert found[1, head, key] == pytest.approx((of_head @ weight[head]).norm().item(), rel=1e-4)


def planted(monkeypatch, cost_of_sinks):
    """Passes in which the start token holds much of the attention of each head.

    Hiding keys costs the attention they hold, and `cost_of_sinks` more if they are the start token.
    """

    def of(model, ids, canvas, masked, hidden=None):
        rng = np.random.default_rng(ids.tolist())
        shape = (model.cfg.n_layers, model.cfg.n_heads, len(ids), len(ids))
        pattern = torch.from_numpy(rng.uniform(0.5, 1.5, shape)) / len(ids)
        pattern[..., 0] = 0.3
        pattern = pattern / pattern.sum(dim=-1, keepdim=True)
        if hidden is None:
            return module.Read(3.0, pattern, torch.ones(shape[:-1]))
        lost = float((pattern.sum(dim=-2) * hidden).sum()) / pattern.sum().item()
        extra = cost_of_sinks if bool(hidden[..., 0].all()) else 0.0
        return module.Read(3.0 + lost + extra + rng.normal(0, 0.01), torch.empty(0), torch.empty(0))

    monkeypatch.setattr(module, "read", of)


@pytest.mark.parametrize(("extra", "verdict"), [(0.5, "holds"), (0.0, "cannot tell")])
def test_sinks_that_cost_what_their_attention_costs_are_separated_from_others(extra, verdict, tiny_llada, monkeypatch):
    """In both, hiding the sinks costs far more than hiding as many other keys."""
    planted(monkeypatch, extra)
    found = Texts(draws=1, edits=1).run(tiny_llada, PROBLEMS)
    claims = found.tables["claims"].set_index("measure")
    name = "hiding start sinks costs more than hiding as much attention"
    assert claims.loc[name, "verdict"] == verdict
    assert claims.loc[name, "estimate"] == pytest.approx(extra, abs=0.02)
    costs = found.tables["texts"].query("measure == 'cost' and kind == 'start'").set_index("choice")["estimate"]
    assert costs["sink"] - costs["random"] > 0.2
    removed = found.tables["texts"].query("measure == 'removed' and kind == 'start'").set_index("choice")["estimate"]
    assert removed["same_mass"] == pytest.approx(removed["sink"], abs=0.02)


def test_controls_are_no_sinks_and_have_the_number_or_the_attention(tiny_llada):
    ids = tiny_llada.encode(PROBLEMS[0])[0][0]
    pattern = read(tiny_llada, ids, ids, torch.ones(len(ids), dtype=torch.bool)).pattern
    sums = pattern.sum(dim=-2)
    sinks = sums - 1 > 3
    seen = sums - pattern.diagonal(dim1=-2, dim2=-1)
    order = torch.rand(sums.shape, generator=torch.Generator().manual_seed(0))
    found = module._choices(sinks, sinks, sums, seen, order)
    assert list(found) == list(CHOICES)
    assert sinks.any()
    assert not (found["random"] & sinks).any()
    assert not (found["same_mass"] & sinks).any()
    assert (found["random"].sum(dim=-1) == sinks.sum(dim=-1)).all()
    mass = {name: (seen * keys).sum(dim=(1, 2)) for name, keys in found.items()}
    enough = (seen * ~sinks).sum(dim=(1, 2)) > mass["sink"]
    assert enough.any()
    torch.testing.assert_close(mass["same_mass"][enough], mass["sink"][enough], atol=float(seen[~sinks].max()), rtol=0)


def test_measures_of_a_text(tiny_llada, tiny_llama):
    found = Texts(draws=3).run([tiny_llada, tiny_llama], PROBLEMS[:2]).measured
    masked, causal = found["tiny-llada"], found["tiny-llama"]
    assert set(masked["kind"].to_numpy()) == set(KINDS)
    assert causal["per_place"].sel(kind="mask").isnull().all()
    assert masked["per_place"].sel(kind="mask").notnull().all()
    assert causal["jump_share"].sel(edit=["edited", "revealed"]).isnull().all()
    assert masked["jump_share"].notnull().all()
    ids = tiny_llama.encode(PROBLEMS[0])[0][0]
    logits = tiny_llama(ids[None])[0].double()
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert causal["nats"][0].item() == pytest.approx(loss.item(), abs=1e-5)


def test_a_text_needs_three_tokens(tiny_llada):
    with pytest.raises(SettingError, match=r"needs at least three tokens per text; got \[2, 5\]"):
        Texts().run(tiny_llada, [[2, 5]])
