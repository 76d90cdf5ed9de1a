"""Comparing runs: every number against a loop over positions, and hand-made cases against known results."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from asked import PROMPTS
from building import random_hf, random_ids

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import compare, corrupted, effect, logit_lens, of_step, sinks_compared
from sinklens.interventions import AblateHeads, ForceTokens, MaskedLogits, MaskSinks, SinkToken
from sinklens.sampling import DualCache
from sinklens.sampling.loop import unmask_steps
from sinklens.sinks import EpsilonOverMean

SHORT = {"gen_length": 8}
CHANGE = AblateHeads(layers=[0, 1])


def run_with_logits(model, hooks=(), prompts=PROMPTS, **settings):
    """A run, what `MaskedLogits` kept of it, and the logits of the complete canvas at every step."""
    kept, every = MaskedLogits(), {}
    keep = ("denoise.hook_logits", lambda value, hook: every.update({hook.step: value.double().numpy().copy()}))
    run = sinklens.generate(model, prompts, hooks=[*hooks, kept, keep], record_sinks=False, **SHORT, **settings)
    return run, kept.kept, every


@pytest.fixture(scope="module", params=["tiny_llada", "tiny_llama"])
def pair(request):
    """A run, the same with heads ablated, and that under replay: each as returned by `run_with_logits`."""
    model = request.getfixturevalue(request.param)
    base = run_with_logits(model)
    return base, run_with_logits(model, [CHANGE]), run_with_logits(model, [CHANGE], replay=base[0])


def undecided(run, step, row):
    """Positions of a row with logits at a step, and their indices in the logits."""
    ids = run.canvas[row, step]
    if run.model.mask_token_id is not None:
        return [(place, place) for place in range(len(ids)) if ids[place] == run.model.mask_token_id]
    answer = ids[run.prompt_length : run.prompt_length + step].tolist()
    return [] if set(answer) & set(run.model.eos_token_ids) else [(run.prompt_length + step, 0)]


def softmax(values):
    shares = np.exp(values - values.max())
    return shares / shares.sum()


def test_measures_of_steps_match_their_definitions(pair):
    """Also at marked positions and at the others."""
    base, checked = pair[0], 0
    for changed in pair[1:]:
        steps = max(base[0].steps_run, changed[0].steps_run)
        marked = np.random.default_rng(2).random((3, steps, base[0].canvas.shape[2])) < 0.4
        found = compare(base[0], changed[0], base[1], changed[1], attended=marked)
        assert found["step"].to_numpy().tolist() == list(range(steps))
        for row, step in np.ndindex(3, steps):
            names = ("kl", "top1_agreement", "confidence", "confidence_changed", "change_attended", "change_rest")
            values, both = {name: [] for name in names}, []
            if step < min(base[0].steps_run, changed[0].steps_run):
                both = [place for place in undecided(base[0], step, row) if place in undecided(changed[0], step, row)]
            for place, at in both:
                p, q = (softmax(run[2][step][row, at]) for run in (base, changed))
                values["kl"].append(sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
                values["top1_agreement"].append(p.argmax() == q.argmax())
                values["confidence"].append(p.max())
                values["confidence_changed"].append(q.max())
                values["change_attended" if marked[row, step, place] else "change_rest"].append(q.max() - p.max())
            for name, numbers in values.items():
                expected = np.mean(numbers) if numbers else math.nan
                assert float(found[name][row, step]) == pytest.approx(expected, abs=1e-9, nan_ok=True), (
                    name,
                    row,
                    step,
                )
                checked += bool(numbers)
    assert checked > 80
    assert float(found["kl"].max()) > 0.01


@pytest.mark.fast_cases(1)
def test_effect_is_the_three_runs_and_their_two_comparisons(pair):
    base, free, replayed = pair
    found = effect(base[0].model, PROMPTS, CHANGE, **SHORT)
    for result, expected in ((found.base, base), (found.free, free), (found.replayed, replayed)):
        assert torch.equal(result.canvas, expected[0].canvas)
    assert found.free_running.equals(compare(base[0], free[0], base[1], free[1]))
    assert found.under_replay.equals(compare(base[0], replayed[0], base[1], replayed[1]))
    assert found.free_running["first_divergent_step"].max() >= 0
    same = sum(before.text == after.text for before, after in zip(base[0].answers, free[0].answers, strict=True))
    assert repr(found) == (
        f"Effect({same} of {len(PROMPTS)} answers stay the same, mean KL under replay "
        f"{float(found.under_replay['kl'].mean()):.3g} nats over {base[0].steps_run} steps)"
    )


@pytest.mark.filterwarnings("ignore::sinklens.errors.InterventionWarning")
@pytest.mark.parametrize(
    ("which", "note"),
    [
        ({"top_k": 1, "pick": "random"}, r"; controls picked 168 of 168 keys\)$"),
        ({"detector": EpsilonOverMean(20)}, r"; no rule found a place, so it changed nothing\)$"),
        ({"detector": EpsilonOverMean(20), "pick": "random"}, r"; no rule found a place, so it changed nothing\)$"),
        ({"top_k": 1}, r" nats over 8 steps\)$"),
    ],
)
def test_an_effect_says_what_its_rules_found(tiny_llada, which, note):
    assert re.search(note, repr(effect(tiny_llada, PROMPTS[0], MaskSinks(**which), **SHORT)))


def test_orders_edits_and_changed_shares_of_hand_made_runs(tiny_llada):
    """Kendall's τ-b with ties, NaN where all steps are equal; edits up to the first end token."""
    base = sinklens.generate(tiny_llada, PROMPTS, record_sinks=False, **SHORT)
    end, mask = tiny_llada.eos_token_ids[0], tiny_llada.mask_token_id
    same, five, runs = [5, 6, 7, 5, 6, 7, 5, 6], [5] * 5, []
    up, down, pairs, turns = range(8), range(7, -1, -1), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3]
    for tokens, steps in (
        ([[5, 6, 7, end, *five[1:]], same, [5, 6, mask, 7, end, *five[2:]]], [[3] * 8, up, pairs]),
        ([[5, 7, end, *five], same, [6, 5, mask, end, end, *five[2:]]], [up, down, turns]),
    ):  # fmt: skip
        canvas, unmask = base.canvas.clone(), base.unmask_step.clone()
        canvas[:, -1, base.prompt_length :] = torch.tensor(tokens)
        unmask[:, base.prompt_length :] = torch.tensor([list(row) for row in steps])
        runs.append(replace(base, canvas=canvas, unmask_step=unmask))
    found = compare(*runs)
    assert {name: found[name].to_numpy().tolist() for name in ("edit_distance", "same_answer", "changed_share")} == {
        "edit_distance": [1, 0, 3], "same_answer": [False, True, False], "changed_share": [3 / 8, 0, 3 / 8],
    }  # fmt: skip
    assert found["order"].to_numpy() == pytest.approx([math.nan, -1, (18 - 2) / 24], nan_ok=True)


def course(model, answers, prompt=(9, 9)):
    """A run of one row whose answer has the given canvases; M is the mask."""
    mask = -1 if model.mask_token_id is None else model.mask_token_id
    ids = [[*prompt, *(mask if token == "M" else token for token in answer)] for answer in answers]
    canvas, length = torch.tensor(ids)[None], len(answers[0])
    real = torch.ones(1, canvas.shape[2], dtype=torch.bool)
    some = sinklens.generate(model, PROMPTS[0], record_sinks=False, gen_length=1)
    settings = replace(some.settings, gen_length=length, **({} if model.config.is_causal else {"block_length": length}))
    undecided = canvas == mask
    return replace(
        some,
        canvas=canvas,
        undecided=undecided,
        unmask_step=unmask_steps(canvas, undecided, real, len(prompt)),
        real=real,
        prompt_length=len(prompt),
        settings=settings,
    )


@pytest.mark.parametrize(
    ("answers", "first"),
    [
        (["MMM", "5MM", "5M7", "567"], -1),
        (["MMM", "4MM", "4M7", "467"], 0),  # another token
        (["MMM", "5MM", "56M", "567"], 1),  # another order
        (["MMM", "5MM", "5M7", "587"], 2),
        (["MMM", "5MM", "5M7"], 2),  # ended a step earlier
        (["MMM", "5MM", "5M7", "567", "567", "567"], -1),  # waited for other rows
        (["MMM", "5MM", "5M7", "567", "564"], 3),  # continued
        (["4MM", "5MM", "5M7", "567"], 0),  # began on another canvas
    ],
)
def test_the_first_divergent_step_of_hand_made_canvases(tiny_llada, answers, first):
    def tokens(text):
        return [sign if sign == "M" else int(sign) for sign in text]

    base = course(tiny_llada, [tokens(answer) for answer in ("MMM", "5MM", "5M7", "567")])
    changed = course(tiny_llada, [tokens(answer) for answer in answers])
    assert compare(base, changed)["first_divergent_step"].to_numpy().tolist() == [first]


def test_tokens_added_to_an_ended_autoregressive_row_are_not_counted(tiny_llama):
    end = tiny_llama.eos_token_ids[0]
    alone = course(tiny_llama, [["M"] * 4, [5, "M", "M", "M"], [5, end, "M", "M"]])
    waited = course(tiny_llama, [*alone.canvas[0, :, 2:].tolist(), [5, end, end, -1], [5, end, end, end]])
    longer = course(tiny_llama, [["M"] * 4, [5, "M", "M", "M"], [5, 6, "M", "M"], [5, 6, end, "M"]])
    for other, first, edits in ((waited, -1, 0), (longer, 1, 1)):
        found = compare(alone, other)
        assert (found["first_divergent_step"].item(), found["edit_distance"].item()) == (first, edits)
    assert compare(alone, waited)["order"].item() == pytest.approx(1.0)


def same_value(value, hook):
    return value.clone()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("model", ["tiny_llada", "tiny_llama"])
@pytest.mark.parametrize(
    "hooks",
    [
        [MaskSinks(top_k=0)],
        [ForceTokens(tokens={0: 2})],  # the start token, which is there
        [("blocks.1.attn.hook_z", same_value), ("denoise.hook_canvas", same_value)],
        [],
    ],
    ids=["no key", "the same token", "functions", "nothing"],
)
def test_an_identity_gives_exactly_the_base_run(request, model, hooks):
    found = effect(request.getfixturevalue(model), PROMPTS[:2], hooks, **SHORT)
    for compared in (found.free_running, found.under_replay):
        assert compared["kl"].fillna(0).to_numpy().max() == 0.0
        assert compared["kl"].notnull().any("step").all()
        assert compared["top1_agreement"].min() == 1.0
        assert (compared["confidence"].fillna(0) == compared["confidence_changed"].fillna(0)).all()
        assert compared["first_divergent_step"].to_numpy().tolist() == [-1, -1]
        assert compared["edit_distance"].to_numpy().tolist() == [0, 0]
        assert compared["order"].to_numpy() == pytest.approx(1.0)
        assert compared["same_answer"].all()


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_logits_are_kept_only_at_the_chosen_steps(shipped):
    kept, every = MaskedLogits(steps=[0, -1]), MaskedLogits()
    run = sinklens.generate(shipped, PROMPTS, hooks=[every, kept], record_sinks=False, **SHORT)
    assert sorted(kept.kept) == [0, 7]
    for step, logits in kept.kept.items():
        assert torch.equal(logits, every.kept[step])
        assert len(logits) == (
            3 if shipped.config.is_causal else int((run.canvas[:, step] == shipped.mask_token_id).sum())
        )
    found = compare(run, run, kept.kept, kept.kept)
    assert found["kl"].notnull().any("batch").to_numpy().nonzero()[0].tolist() == [0, 7]
    sinklens.generate(shipped, PROMPTS[0], hooks=[kept], record_sinks=False, gen_length=4)
    assert sorted(kept.kept) == [0, 3]


def test_a_token_ruled_out_by_both_runs_adds_nothing_to_the_kl(tiny_llada):
    """0 · log 0 is 0; a token that only the changed run rules out makes the KL infinite."""
    run = course(tiny_llada, [["M", "M"], [5, 6]])
    p, q = torch.tensor([[0.0, 1.0, -torch.inf]] * 2), torch.tensor([[1.0, 0.0, -torch.inf]] * 2)
    shares = softmax(np.array([0.0, 1.0]))
    found = compare(run, run, {0: p}, {0: q})["kl"].item()
    assert found == pytest.approx((shares * np.log(shares / shares[::-1])).sum())
    assert compare(run, run, {0: p}, {0: torch.tensor([[0.0, -torch.inf, 0.0]] * 2)})["kl"].item() == math.inf


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_compared_is_refused(tiny_llada):
    run = sinklens.generate(tiny_llada, PROMPTS, **SHORT)
    ids, settings = tiny_llada.encode(PROMPTS[0])[0], {"record_sinks": False}
    short, long, other, fewer = (
        sinklens.generate(tiny_llada, some, **settings, gen_length=length)
        for some, length in ((ids[:, :-4], 12), (ids, 8), ([PROMPTS[1], PROMPTS[0], PROMPTS[2]], 8), (PROMPTS[:2], 8))
    )
    longer = sinklens.generate(tiny_llada, ids, hooks=[SinkToken()], **settings, gen_length=8)
    one, two, logits = {1: torch.zeros(1, 3)}, {2: torch.zeros(1, 3)}, "pass both base_logits and changed_logits"
    calls = [
        (lambda: compare(run, fewer), r"prompts and lengths; got \[3, \d+\] and \[2, \d+\] \(rows, positions\)"),
        (lambda: compare(run, other), r"have the same prompts; these do not"),
        (lambda: compare(short, long), "have the same prompts"),  # one prompt begins the other
        (lambda: compare(long, longer), r"got \[1, \d+\] and \[1, \d+\] \(rows, positions\)"),
        (lambda: compare(run, run, attended=run.real.numpy()), logits),
        (lambda: compare(run, run, one), logits),
        (lambda: compare(run, run, None, one), logits),
        (lambda: compare(run, run, one, two), r"no step has .* base_logits holds steps \[1\], .* \[2\]"),
        (lambda: MaskedLogits().hooks_for(tiny_llada), "use MaskedLogits in a run of several steps"),
        (lambda: sinks_compared(run, other), "sinks_compared needs the sinks of both runs; run them with record_sinks"),
        *(
            (lambda other=other: effect(run.model, PROMPTS, other=other), r"layers, heads and vocabulary; got \(4")
            for other in (random_hf_model(2), "tiny-text")
        ),
    ]  # fmt: skip
    for given in ("Question: 1 + 1?", None, torch.zeros(1, 2, 3)):
        kind = rf"must be a run .* got {'Tensor' if given is not None and len(given) == 1 else repr(given)[:9]}"
        calls += [
            (lambda given=given: compare(given, run), f"base {kind}"),
            (lambda given=given: compare(run, given), f"changed {kind}"),
            (lambda given=given: corrupted(given, {"a": "b"}), f"base {kind}"),
            (lambda given=given: sinks_compared(given, run), f"base {kind}"),
            (lambda given=given: logit_lens(run.model, given), f"run {kind}"),
            (lambda given=given: of_step(given, 0), f"run {kind}"),
        ]
    for call, match in calls:
        with pytest.raises(SettingError, match=match):
            call()
    with sinklens.trace(tiny_llada, PROMPTS[0], record_sinks=False, **SHORT) as t:  # a trace is a run
        for _ in t.steps:
            pass
    assert bool(compare(t, t)["same_answer"].all())


# --- another model, and a cache policy ---------------------------------------------------------------------------


def random_hf_model(layers=3, factor=1.0):
    """A random model whose logits are `factor` times its own."""
    hf = random_hf(num_hidden_layers=layers)
    hf.lm_head.weight.data *= factor
    return sinklens.load(hf)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_kl_is_that_of_the_models_distributions_on_the_reference_s_canvases(factor):
    """Halved logits keep every decision by confidence's order and every sink; the distributions are flatter."""
    found = effect(random_hf_model(), random_ids()[:, :4], other=random_hf_model(factor=factor), gen_length=4, steps=4)
    assert found.sinks_moved == 0
    for step in range(4):
        canvas = found.base.canvas[:1, step]
        with torch.no_grad():
            logits = found.base.model(canvas)[0, found.base.undecided[0, step]].double()
        p, q = logits.log_softmax(-1), (logits * factor).log_softmax(-1)
        wanted = float((p.exp() * (p - q)).sum(-1).mean())
        assert float(found.under_replay["kl"][0, step]) == pytest.approx(wanted, rel=1e-4, abs=1e-9)


CACHED = {"gen_length": 12, "block_length": 6}
WORDS = ["one two three four five six", "seven eight nine"]


@pytest.fixture(scope="module")
def policy(worded):
    return effect(worded("llama"), WORDS, cache=DualCache(), **CACHED)


def test_kl_under_replay_is_that_of_the_computed_masked_positions(worded, policy):
    exact, cached = MaskedLogits(), MaskedLogits()
    base = sinklens.generate(worded("llama"), WORDS, hooks=[exact], **CACHED)
    run = sinklens.generate(worded("llama"), WORDS, hooks=[cached], replay=base, cache=DualCache(), **CACHED)
    assert torch.equal(policy.replayed.canvas, policy.base.canvas)
    kl = policy.under_replay["kl"].to_numpy()
    assert kl[:, [0, 6]] == pytest.approx(0, abs=1e-9)  # complete steps
    for step in (2, 8):
        places = run.undecided[:, step].nonzero()
        first = run.prompt_length + step // 6 * 6
        inside = (places[:, 1] >= first) & (places[:, 1] < first + 6)
        assert (cached.kept[step].isnan().all(-1) == ~inside).all()
        p, q = (logits.kept[step].double().softmax(-1) for logits in (exact, cached))
        for row in range(2):
            expected = (p * (p / q).log()).sum(-1)[inside & (places[:, 0] == row)].mean()
            assert kl[row, step] == pytest.approx(float(expected), rel=1e-4)
            assert kl[row, step] > 1e-6


def test_sinks_that_were_lost_added_and_moved_are_counted(policy):
    """Over the queries that the policy computed."""
    assert ["fresh" in run.sinks for run in (policy.base, policy.free)] == [False, True]
    queries = policy.replayed.sinks["fresh"].any("layer")
    assert (policy.same_queries.sinks["computed"] == queries).all()
    assert int(queries.isel(step=2).sum()) == 12  # the block of both rows
    everywhere = sinks_compared(policy.base, policy.replayed)
    moved = policy.under_replay["sinks_moved"]
    assert int(moved.isel(step=[0, 6]).sum()) == 0
    assert 0 < int(moved.sum()) < int(everywhere["sinks_moved"].sum())
    for data, base in ((everywhere, policy.base), (policy.under_replay, policy.same_queries)):
        scores = [run.sinks["score"].to_numpy() for run in (base, policy.replayed)]
        for row, step in ((0, 0), (0, 3), (1, 7)):
            sets, tops = [], []
            for score in scores:
                at = score[row, step][..., base.real[row].numpy()]
                at = at / at.mean(-1, keepdims=True)
                rest = (at.sum(-1, keepdims=True) - at) / (at.shape[-1] - 1)
                sets.append(at > rest + 3.0)
                tops.append(at.argmax(-1))
            here = data.isel(batch=row, step=step)
            expected = [sets[0], sets[0] & ~sets[1], sets[1] & ~sets[0], tops[0] != tops[1]]
            counts = [int(here[name]) for name in ("sinks", "sinks_lost", "sinks_added", "sinks_moved")]
            assert counts == [int(part.sum()) for part in expected]
