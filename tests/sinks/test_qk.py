"""The factors of attention scores against naive loops, planted causes, and a pass in plain torch."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from building import left_padding, plain_pass, random_ids, shared_model
from torch import Tensor

import sinklens
from sinklens.errors import TrackError
from sinklens.sinks.qk import decompose, why
from sinklens.tasks import held_out


def naive(query, key, scale, sees):
    """Every variable of `decompose` by loops over plain numbers; `sees(i, j)` is whether query i may see key j.

    ``from_rest`` is computed as the documented covariance, not as the remainder of the other two.
    """
    query, key = query.double().tolist(), key.double().tolist()

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def norm(a):
        return math.sqrt(dot(a, a))

    def average(values):
        values = list(values)
        return sum(values) / len(values) if values else math.nan

    def cos(i, j):
        lengths = norm(query[i]) * norm(key[j])
        return dot(query[i], key[j]) / lengths if lengths else 0.0

    keys = range(len(key))
    others = {(i, j): [k for k in keys if k != j and sees(i, k)] for i in range(len(query)) for j in keys}
    seers = {j: [i for i in range(len(query)) if sees(i, j) and others[i, j]] for j in keys}
    long = {j: average(norm(query[i]) for i in seers[j]) for j in keys}
    lines = []
    for j in keys:
        score = {i: scale * dot(query[i], key[j]) for i in seers[j]}
        norm0 = {i: average(norm(key[k]) for k in others[i, j]) for i in seers[j]}
        cos0 = {i: average(cos(i, k) for k in others[i, j]) for i in seers[j]}
        score0 = {i: average(scale * dot(query[i], key[k]) for k in others[i, j]) for i in seers[j]}
        gain = {i: scale * norm(query[i]) for i in seers[j]}
        line = {
            "key_norm": norm(key[j]),
            "key_norm_ratio": norm(key[j]) / average(norm0.values()),
            "query_norm": long[j],
            "query_norm_ratio": long[j] / average(long[k] for k in keys if k != j and not math.isnan(long[k])),
            "cosine": average(cos(i, j) for i in seers[j]),
            "cosine_excess": average(cos(i, j) - cos0[i] for i in seers[j]),
            "score": average(score.values()),
            "score_excess": average(score[i] - score0[i] for i in seers[j]),
            "from_key_norm": average(gain[i] * (norm(key[j]) - norm0[i]) * (cos(i, j) + cos0[i]) / 2 for i in seers[j]),
            "from_cosine": average(gain[i] * (cos(i, j) - cos0[i]) * (norm(key[j]) + norm0[i]) / 2 for i in seers[j]),
            "from_rest": -average(
                gain[i] * average((norm(key[k]) - norm0[i]) * (cos(i, k) - cos0[i]) for k in others[i, j])
                for i in seers[j]
            ),
        }
        lines.append(line)
    return lines


def columns(dataset, j):
    return {name: float(value) for name, value in dataset.isel(key=j).data_vars.items()}


@pytest.mark.parametrize("order", ["all", "causal", "ragged"])
def test_the_factors_match_naive_loops(order):
    """Ragged: random visibility, where no query sees key 2 and query 1 sees a single key."""
    query, key = torch.randn(6, 4) * 3, torch.randn(6, 4)
    key[4] = 0
    seen = torch.ones(6, 6, dtype=torch.bool)
    if order == "causal":
        seen = seen.tril()
    if order == "ragged":
        seen = torch.rand(6, 6) > 0.4
        seen[:, 2] = False
        seen[1] = torch.arange(6) == 0
    found = decompose(query, key, 0.5, None if order == "all" else seen)
    for j, line in enumerate(naive(query, key, 0.5, lambda i, k: bool(seen[i, k]))):
        assert columns(found, j) == pytest.approx(line, rel=1e-9, abs=1e-12, nan_ok=True), j


def test_only_causal_order_gives_keys_different_queries():
    """Queries of length 1, 2, 3; query 0 sees one key and is left out."""
    query, key = torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, 1)
    everywhere, causal = decompose(query, key, 1.0), decompose(query, key, 1.0, torch.ones(3, 3).tril().bool())
    assert everywhere["query_norm"].to_numpy().tolist() == [2, 2, 2]
    assert everywhere["query_norm_ratio"].to_numpy().tolist() == [1, 1, 1]
    assert causal["query_norm"].to_numpy().tolist() == [2.5, 2.5, 3]
    assert causal["query_norm_ratio"].to_numpy().tolist() == pytest.approx([2.5 / 2.75, 2.5 / 2.75, 3 / 2.5])


class Planted:
    """A model of one layer and head with given queries and keys."""

    def __init__(self, query: Tensor, key: Tensor, causal: bool = False) -> None:
        self.query, self.key = query, key
        self.cfg = SimpleNamespace(n_layers=1, n_heads=1, device="cpu")
        self.causal, self.tokenizer = causal, None

    def run_with_cache(self, ids, names_filter):
        seen = torch.ones(len(self.query), len(self.key)).bool()
        scores = self.query @ self.key.T * self.key.shape[1] ** -0.5
        pattern = scores.masked_fill(~(seen.tril() if self.causal else seen), -torch.inf).softmax(dim=-1)
        values = self.query[None, :, None], self.key[None, :, None], pattern.sum(dim=0)[None, None]
        return None, dict(zip(names_filter, values, strict=True))


def planted_reason(query, key, position=None, causal=False):
    run = SimpleNamespace(canvas=torch.arange(len(key)).expand(1, 2, -1), real=torch.ones(1, len(key)).bool())
    return why(Planted(query, key, causal), run, step=0, layer=0, head=0, position=position)


def test_a_reason_names_the_planted_cause():
    along = torch.tensor([[3.0, 0.0]] * 4)
    long = torch.tensor([[1.0, 0.0], [1.0, 0.0], [5.0, 0.0], [1.0, 0.0]])
    turned = torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    assert (planted_reason(along, long).position, planted_reason(along, long).chief) == (2, "key_norm")
    assert (planted_reason(along, turned).position, planted_reason(along, turned).chief) == (1, "cosine")
    assert planted_reason(along, long, position=0).chief == "uniform"
    away = torch.tensor([[0.0, 4.0], [1.0, 0.0], [-7.0, 0.0]])
    assert planted_reason(torch.tensor([[0.01, 0.0]] * 3), away, position=0).chief == "rest"


def test_a_sink_of_few_queries_is_reported_as_such():
    """Query 0 attends only to key 0, query 1 opposes it twice as strongly: a large share, a low mean score."""
    query = torch.tensor([[30.0, 0.0], [-60.0, 0.0]])
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    reason = planted_reason(query, key, position=0)
    assert (reason.position, reason.chief) == (0, "few")
    assert float(reason.factors["score_excess"].sel(key=0)) < 0
    assert reason.share == pytest.approx(0.5, abs=1e-6)


def test_visibility_to_all_queries_is_not_reported_as_a_cause():
    """Under causal order equal keys get unequal shares: (1 + 1/2 + 1/3) / 3 for the first."""
    reason = planted_reason(torch.randn(3, 2), torch.ones(3, 2), causal=True)
    assert (reason.position, reason.chief) == (0, "uniform")
    assert reason.share == pytest.approx(11 / 18)
    assert reason.uniform == pytest.approx(11 / 18)
    assert "no more than if all keys were equal" in str(reason)


def test_a_reason_reads_as_one_line():
    long = torch.tensor([[1.0, 0.0], [1.0, 0.0], [5.0, 0.0], [1.0, 0.0]])
    reason = planted_reason(torch.tensor([[2**0.5, 0.0]] * 4), long)
    share = math.exp(5) / (math.exp(5) + 3 * math.e)
    assert str(reason) == (
        f"position 2 (token 2) receives {share:.1%} of head 0.0 at step 0 (uniform 25.0%), mainly because its key is "
        f"longer: |k| 5.00 × the other keys', cosine +1.00 (others +1.00), score +5.00 (others +1.00)"
    )
    assert "(token 2, '\\n') receives" in str(replace(reason, text="\n"))


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_why_explains_the_scores_of_a_pass_in_plain_torch(architecture, causal):
    """Grouped heads (6 over 2), left padding, and a row whose queries and keys come from its own canvas."""
    model = shared_model(architecture, causal)
    real = left_padding(length=7, padded=3)
    prompt = random_ids(length=7)
    run = padded_run(model, prompt, real)
    for row, layer, head in ((0, 0, 5), (0, 2, 1), (1, 1, 3)):
        step = 2
        canvas = run.canvas[row, step][None]
        there = run.real[row] & (canvas[0] >= 0)
        length = int(there.nonzero().max()) + 1
        with torch.no_grad():
            values = plain_pass(model, canvas[:, :length], there[None, :length]).values
        scores = values[f"blocks.{layer}.attn.hook_attn_scores"][0, head].double()
        received = values[f"blocks.{layer}.attn.hook_sink_scores"][0, head]
        reason = why(model, run, step, layer, head, row)
        keys = there.nonzero()[:, 0].tolist()
        assert reason.factors["key"].to_numpy().tolist() == keys
        assert reason.position == int(received.argmax())
        assert reason.share == pytest.approx(float(received.max() / there.sum()), rel=1e-4)
        assert reason.token_id == int(canvas[0, reason.position])
        for key in keys:
            seers = [i for i in keys if not causal or (i >= key and i != keys[0])]
            mean = float(scores[seers, key].mean())
            assert float(reason.factors["score"].sel(key=key)) == pytest.approx(mean, rel=1e-4, abs=1e-5)
            norm = values[f"blocks.{layer}.attn.hook_rot_k"][0, key, head // 3].norm()
            assert float(reason.factors["key_norm"].sel(key=key)) == pytest.approx(float(norm), rel=1e-5)


def padded_run(model, prompt, real):
    """Only the canvases and real positions of a run: answers of 4 after `prompt`, one decided per step."""
    causal = model.causal
    answer = torch.full((len(prompt), 5, 4), -1 if causal else 60)
    for step in range(1, 5):
        answer[:, step:, step - 1] = 10 + step
    canvas = torch.cat([prompt[:, None].expand(-1, 5, -1), answer], dim=2)
    return SimpleNamespace(canvas=canvas, real=torch.cat([real, torch.ones(len(real), 4, dtype=torch.bool)], dim=1))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_the_share_is_that_of_the_run_s_track(name, request):
    model = request.getfixturevalue(name)
    run = sinklens.generate(model, [problem.prompt for problem in held_out(3)])
    assert not run.real.all()
    share, top = run.sinks.scores("fraction").to_numpy(), run.sinks.top(1).to_numpy()
    for row, step, layer, head in ((0, 0, 0, 0), (1, 5, 3, 2), (2, run.steps_run - 1, 1, 5)):
        reason = why(model, run, step, layer, head, row)
        assert reason.position == top[row, step, layer, head, 0]
        assert reason.share == pytest.approx(float(share[row, step, layer, head, reason.position]), rel=1e-3)
        assert reason.text == model.tokenizer.decode([int(run.canvas[row, step, reason.position])])
        assert why(model, run, step - run.steps_run, layer - 4, head - 6, row - 3).position == reason.position


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({"step": 4}, r"step 4 does not exist; this run has 4, 0 to 3"),
        ({"layer": 3}, r"layer 3 does not exist; this run has 3, 0 to 2"),
        ({"head": -7}, r"head -7 does not exist; this run has 6, 0 to 5"),
        ({"row": 2}, r"row 2 does not exist; this run has 2, 0 to 1"),
        ({"position": 11}, r"position 11 does not exist; this run has 11, 0 to 10"),
        ({"position": 2}, r"position 2 is padding or not decoded yet at this step; choose 3 to 8"),
        ({"position": 9}, r"position 9 is padding or not decoded yet at this step; choose 3 to 8"),
    ],
)
def test_a_place_that_does_not_exist_in_the_run_is_rejected(places, text):
    model = shared_model("llama", True)
    run = padded_run(model, random_ids(length=7), left_padding(length=7, padded=3))
    with pytest.raises(TrackError, match=text):
        why(model, run, **{"step": 2, "layer": 0, "head": 0, "row": 0} | places)
