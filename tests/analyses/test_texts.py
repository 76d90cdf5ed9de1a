"""The study of texts: planted sinks that cost more than their attention, or just as much."""

import importlib

import numpy as np
import pytest
import torch
import xarray as xr

from sinklens.analyses.pair import Pair
from sinklens.analyses.passes import Read, TextCanvas, loss
from sinklens.analyses.texts import CLAIMS, KINDS, Texts
from sinklens.errors import SettingError
from sinklens.tasks import held_out

texts = importlib.import_module("sinklens.analyses.texts")
PROBLEMS = [problem.prompt for problem in held_out(12)]


def planted(monkeypatch, cost_of_sinks):
    """Passes in which the start token holds much of the attention of each head.

    Keys that are hidden or stale cost the attention they hold, and `cost_of_sinks` more if the start token is one.
    """

    def pattern_of(model, ids):
        rng = np.random.default_rng(ids.tolist())
        shape = (model.cfg.n_layers, model.cfg.n_heads, len(ids), len(ids))
        pattern = torch.from_numpy(rng.uniform(0.5, 1.5, shape)) / len(ids)
        pattern[..., 0] = 0.3
        return pattern / pattern.sum(dim=-1, keepdim=True)

    def planted_loss(model, canvas, keys):
        sums = pattern_of(model, canvas.ids).sum(dim=-2)
        lost = float((sums * keys).sum() / sums.sum())
        noise = np.random.default_rng(torch.nonzero(keys).flatten().tolist()).normal(0, 0.01)
        return 3.0 + lost + noise + (cost_of_sinks if bool(keys[..., 0].all()) else 0.0)

    def planted_read(model, canvas):
        pattern = pattern_of(model, canvas.ids)
        one = torch.ones(*pattern.shape[:1], pattern.shape[-1], 1, 1)
        return Read(3.0, pattern, pattern.log(), one.expand(-1, -1, pattern.shape[1], -1), one, *[torch.empty(0)] * 2)

    monkeypatch.setattr(texts, "read", planted_read)
    monkeypatch.setattr(texts, "loss", planted_loss)
    each = lambda model, canvas, plain, hidden: [planted_loss(model, canvas, keys) for keys in hidden]  # noqa: E731
    monkeypatch.setattr(texts, "losses", each)
    monkeypatch.setattr(texts, "written", lambda model, read: torch.ones_like(read.sums))
    monkeypatch.setattr(texts, "outdating", lambda keys, earlier: keys)


@pytest.mark.parametrize(("extra", "verdict"), [(0.5, "holds"), (0.0, "cannot tell")])
def test_sinks_that_cost_what_their_attention_costs_are_separated_from_others(extra, verdict, tiny_llada, monkeypatch):
    """In both, sinks cost far more than as many other keys."""
    planted(monkeypatch, extra)
    found = Texts(draws=1, edits=1).run(tiny_llada, PROBLEMS)
    claims, means = found.tables["claims"].set_index("measure"), found.tables["texts"]
    for name, measure, column in (
        ("hiding start sinks costs more than hiding as much attention", "cost", "choice"),
        ("stale sinks cost more than as much stale attention", "stale_cost", "stale"),
    ):
        assert claims.loc[name, "verdict"] == verdict
        assert claims.loc[name, "estimate"] == pytest.approx(extra, abs=0.02)
        of_start = (means["measure"] == measure) & means["kind"].isin(["start", np.nan])
        costs = means[of_start].set_index(column)["estimate"]
        assert costs["sink"] - costs["random"] > 0.15
    removed = means.query("measure == 'removed' and kind == 'start'").set_index("choice")["estimate"]
    assert removed["same_mass"] == pytest.approx(removed["sink"], abs=0.02)


@pytest.mark.parametrize(("held", "beyond"), [([0.3, 0.44], 0.5), ([0.4, 0.3], np.nan)])
def test_no_claim_rests_on_a_control_that_holds_less_attention_than_the_sinks(held, beyond):
    """Sinks cost 1.5 nats and hold 0.4 of the attention, in two texts; other keys cost 1."""
    axes, at = ("prompt", "kind", "choice"), {"kind": ["any"], "choice": ["sink", "same_mass"]}
    values = {"cost": (axes, [[[1.5, 1.0]]] * 2), "removed": (axes, [[[0.4, one]] for one in held])}
    found = CLAIMS["hiding any sinks costs more than hiding as much attention"].of(xr.Dataset(values, at))
    assert found.values == pytest.approx([beyond] * 2, nan_ok=True)


def test_pairs_subtract_the_causal_model_text_by_text_and_count_once_what_no_mask_changes(tiny_llada, tiny_llama):
    found = Pair(edits=1, shares=(0.3, 0.9), kinds=tuple(KINDS)).run([tiny_llada, tiny_llama], PROBLEMS[:3])
    pairs = found.tables["pairs"].set_index("measure")
    assert set(pairs["model"]) == {"tiny-llada − tiny-llama"}
    assert set(pairs.index) == {name for name in Pair.pairs if name.split()[1] not in ("start", "delimiter", "digit")}
    less = (found.measured["tiny-llada"] - found.measured["tiny-llama"]).mean("prompt")
    expected = [*less["write_ratio"].values, *less["cost"].sel(kind="any", choice="sink").values]
    assert pairs.loc[["log2 of what sinks write", "hiding any sinks"], "estimate"].tolist() == pytest.approx(expected)
    assert np.isnan(pairs.loc["jumps, a token replaced, later queries", "share"])


def test_only_what_follows_a_given_text_is_masked_and_predicted(tiny_llada, tiny_llama):
    """Without edits, and without kinds of sinks to hide, nothing is measured of either."""
    problem = held_out(1)[0]
    text, study = f"{problem.prompt} {problem.answer}", Pair(after="Answer:", shares=(0.3, 1.0), edits=0, kinds=())
    measured = study.run([tiny_llada, tiny_llama], [text]).measured
    for name, model in (("tiny-llada", tiny_llada), ("tiny-llama", tiny_llama)):
        ids, start = model.encode(text).ids[0], len(model.encode(problem.prompt).ids[0])
        answer = torch.arange(len(ids)) >= start
        found = measured[name].isel(prompt=0)
        expected = loss(model, TextCanvas(ids, answer, start), [])
        assert found["nats"].sel(share=1).item() == pytest.approx(expected, abs=1e-6)
        assert all(found[name].isnull().all() for name in ("cost", "jump_share"))
        if not model.causal:
            masked = found["masked"].sel(share=0.3)
            assert (masked[:start].sum(), masked.sum()) == (0, round(0.3 * answer.sum().item()))
    with pytest.raises(SettingError, match=r"no token that is read follows 'Q:' in the text .*; omit after\."):
        Texts(after="Q:").run(tiny_llada, [text])
