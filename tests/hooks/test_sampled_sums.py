"""Sink scores of drawn queries: unbiased, with the standard error of a simple random sample, and no other effect."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError
from sinklens.hooks.attention import sampled_sums
from sinklens.hooks.attention.sampled_sums import QuerySample
from sinklens.sinks import Record

PROMPTS = ["one two three four five six", "seven eight nine"]


@pytest.mark.parametrize("padded", [False, True])
def test_estimates_are_unbiased_and_their_errors_are_those_of_repeated_draws(monkeypatch, padded):
    monkeypatch.setattr(sampled_sums, "FEWEST", 1)
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(2, 3, 24, 8, generator=generator) for _ in range(2))
    real = torch.ones(2, 24, dtype=torch.bool)
    real[1, :6] = not padded
    mask = torch.where(real, 0.0, -torch.inf)[:, None, None]
    scores = query @ key.transpose(-2, -1) + mask
    pattern = scores.softmax(-1) * real[:, None, :, None]
    sample, found, errors = QuerySample([1, 3], 0.5), [], []
    for _ in range(600):
        found.append(sample.column_sums(query, key, scores.logsumexp(-1), 1.0, mask, real if padded else None))
        errors.append(sample.error.square())
    draws = torch.stack(found)
    spread = draws.std(dim=0)
    assert ((draws.mean(dim=0) - pattern.sum(dim=2)).abs() < 4.5 * spread / 600**0.5 + 1e-5).all()
    torch.testing.assert_close(torch.stack(errors).mean(dim=0).sqrt(), spread, rtol=0.15, atol=1e-5)


def test_a_share_of_one_gives_the_exact_sums_without_error():
    query, key = (torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    bias = torch.randn(1, 1, 9, 9, generator=torch.Generator().manual_seed(2))  # another row for every query
    scores = query @ key.transpose(-2, -1) + bias
    sample = QuerySample([1], 1.0)
    found = sample.column_sums(query, key, scores.logsumexp(-1), 1.0, bias)
    torch.testing.assert_close(found, scores.softmax(-1).sum(dim=2))
    assert (sample.error == 0).all()


def test_estimated_scores_are_recorded_with_their_errors_and_change_nothing_else(worded, monkeypatch):
    monkeypatch.setattr(sampled_sums, "FEWEST", 4)
    model, logits = worded("llama"), {}
    for exact in (True, False):
        seen = logits.setdefault(exact, [])
        hooks = [("denoise.hook_logits", lambda value, hook, seen=seen: seen.append(value.clone()))]
        run = sinklens.generate(model, PROMPTS, gen_length=4, hooks=hooks, record_sinks=Record(exact=exact))
        logits[exact].append(run)
    (*before, exact), (*after, estimated) = logits[True], logits[False]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    real = torch.from_numpy(estimated.sinks["is_real"].to_numpy())
    off = torch.from_numpy((estimated.sinks["score"] - exact.sinks["score"]).fillna(0).to_numpy())
    error = torch.from_numpy(estimated.sinks["score_error"].fillna(0).to_numpy())
    assert off.abs().max() > 0.01
    assert 0.5 < float(off.square().mean() / error.square().mean()) < 2
    assert (error[~real[:, None, None, None].expand_as(error)] == 0).all()
    assert "score_error" not in exact.sinks
    again = sinklens.generate(model, PROMPTS, gen_length=4)
    assert torch.equal(*(torch.from_numpy(one.sinks["score"].to_numpy()) for one in (again, exact)))


def test_the_estimates_of_a_row_do_not_depend_on_its_batch(worded, monkeypatch):
    monkeypatch.setattr(sampled_sums, "FEWEST", 3)
    model, settings = worded("llama"), {"gen_length": 4, "progress": False, "record_sinks": Record(exact=False)}
    for cache in (None, "dual"):
        together = sinklens.generate(model, [*PROMPTS, PROMPTS[0]], cache=cache, **settings)
        for row, prompt in enumerate(PROMPTS):
            alone = sinklens.generate(model, prompt, cache=cache, **settings)
            for name in ("score", "score_error"):
                length = alone.sinks[name].sizes["pos"]
                found = together.sinks[name][row, ..., -length:].to_numpy()
                np.testing.assert_allclose(found, alone.sinks[name][0].to_numpy(), atol=1e-4, err_msg=f"{cache} {name}")


def test_estimates_are_for_bidirectional_models(worded, tiny_llama):
    for model in (tiny_llama, worded("sdar")):
        with pytest.raises(SettingError, match="exact=False is for bidirectional models, whose passes compute every"):
            sinklens.generate(model, "one", gen_length=4, record_sinks=Record(exact=False))
