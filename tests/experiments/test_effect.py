"""Comparing runs: every number against a loop over positions, and hand-made cases against known results."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import Effect, compare, corrupted, effect, logit_lens, of_step, sinks_compared
from sinklens.experiments.effect import attention_to
from sinklens.interventions import AblateHeads, ForceTokens, MaskedLogits, MaskSinks, SinkToken
from sinklens.sampling.loop import unmask_steps
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(3)]
SHORT = {"gen_length": 8}
CHANGE = AblateHeads(layers=[0, 1])


class AllLogits:
    """Keeps the logits of the complete canvas at every step, with a separate hook function."""

    def __init__(self):
        self.steps = {}

    def hook(self, value, hook):
        self.steps[hook.step] = value.double().numpy().copy()


def run_with_logits(model, hooks=(), prompts=PROMPTS, **settings):
    """A run, what `MaskedLogits` kept of it, and all its logits."""
    kept, every = MaskedLogits(), AllLogits()
    listed = [*hooks, kept, ("denoise.hook_logits", every.hook)]
    run = sinklens.generate(model, prompts, hooks=listed, record_sinks=False, **SHORT, **settings)
    return run, kept.kept, every.steps


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


def test_kl_agreement_and_confidence_match_their_definitions(pair):
    base, free, replayed = pair
    for changed in (free, replayed):
        found = compare(base[0], changed[0], base[1], changed[1])
        assert found.sizes["batch"] == 3
        assert found["step"].to_numpy().tolist() == list(range(max(base[0].steps_run, changed[0].steps_run)))
        checked = 0
        for row, step in np.ndindex(found["kl"].shape):
            both = []
            if step < min(base[0].steps_run, changed[0].steps_run):
                both = [place for place in undecided(base[0], step, row) if place in undecided(changed[0], step, row)]
            values = {name: [] for name in ("kl", "top1_agreement", "confidence", "confidence_changed")}
            for _, at in both:
                p, q = (softmax(run[2][step][row, at]) for run in (base, changed))
                values["kl"].append(sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
                values["top1_agreement"].append(p.argmax() == q.argmax())
                values["confidence"].append(p.max())
                values["confidence_changed"].append(q.max())
            for name, numbers in values.items():
                got = float(found[name][row, step])
                if not numbers:
                    assert math.isnan(got), (name, row, step)
                    continue
                assert got == pytest.approx(np.mean(numbers), abs=1e-9), (name, row, step)
                checked += 1
        assert checked > 40
    assert float(found["kl"].max()) > 0.01


def tau_b(x, y):
    """Kendall's τ-b by its definition, pair by pair."""
    agree = tied_x = tied_y = 0
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    for i, j in pairs:
        first, second = x[i] - x[j], y[i] - y[j]
        agree += (first * second > 0) - (first * second < 0)
        tied_x += first == 0
        tied_y += second == 0
    below = math.sqrt((len(pairs) - tied_x) * (len(pairs) - tied_y))
    return agree / below if below else math.nan


def test_the_order_is_kendalls_tau_with_ties(tiny_llada):
    base = sinklens.generate(tiny_llada, PROMPTS, record_sinks=False, **SHORT)
    rng = np.random.default_rng(0)
    for _ in range(20):
        steps = [torch.from_numpy(rng.integers(0, 5, size=base.unmask_step.shape)) for _ in range(2)]
        steps[0][0], answer = 3, slice(base.prompt_length, None)  # a row in which all are equal
        found = compare(replace(base, unmask_step=steps[0]), replace(base, unmask_step=steps[1]))["order"].to_numpy()
        expected = [tau_b(*(part[row, answer].tolist() for part in steps)) for row in range(3)]
        assert found == pytest.approx(expected, nan_ok=True)
        assert math.isnan(found[0])


def edits(source, target):
    """Levenshtein distance by the table of all prefixes."""
    table = [[max(i, j) if 0 in (i, j) else 0 for j in range(len(target) + 1)] for i in range(len(source) + 1)]
    for i, j in np.ndindex(len(source), len(target)):
        swap = table[i][j] + (source[i] != target[j])
        table[i + 1][j + 1] = min(swap, table[i][j + 1] + 1, table[i + 1][j] + 1)
    return table[-1][-1]


def test_the_edit_distance_ends_at_the_first_end_token(tiny_llada):
    base = sinklens.generate(tiny_llada, PROMPTS, record_sinks=False, **SHORT)
    end, rng, seen = tiny_llada.eos_token_ids[0], np.random.default_rng(1), set()
    for _ in range(30):
        runs, texts = [], []
        for _ in range(2):
            canvas = base.canvas.clone()
            drawn = rng.choice([5, 6, 7, tiny_llada.mask_token_id, end], p=[0.3, 0.3, 0.2, 0.1, 0.1], size=(3, 8))
            canvas[:, -1, base.prompt_length :] = torch.from_numpy(drawn)
            runs.append(replace(base, canvas=canvas))
            texts.append([row[: row.index(end)] if end in row else row for row in drawn.tolist()])
        found = compare(*runs)
        expected = [edits(*answers) for answers in zip(*texts, strict=True)]
        assert found["edit_distance"].to_numpy().tolist() == expected
        assert found["same_answer"].to_numpy().tolist() == [distance == 0 for distance in expected]
        seen |= set(expected)
    assert len(seen) > 4


def test_the_share_of_changed_tokens_counts_positions(tiny_llada):
    base = sinklens.generate(tiny_llada, PROMPTS, record_sinks=False, **SHORT)
    changed = base.canvas.clone()
    changed[0, -1, -1] = changed[1, -1, base.prompt_length :] = 7
    found = compare(base, replace(base, canvas=changed))["changed_share"].to_numpy().tolist()
    answer = base.tokens[1, base.prompt_length :]
    assert found == [1 / len(answer), float((answer != 7).double().mean()), 0.0]


def course(model, answers, prompt=(9, 9)):
    """A run of one row whose answer has the given canvases; M is the mask."""
    mask = -1 if model.mask_token_id is None else model.mask_token_id
    ids = [[*prompt, *(mask if token == "M" else token for token in answer)] for answer in answers]
    canvas, length = torch.tensor(ids)[None], len(answers[0])
    real = torch.ones(1, canvas.shape[2], dtype=torch.bool)
    some = sinklens.generate(model, PROMPTS[0], record_sinks=False, gen_length=1)
    settings = replace(some.settings, gen_length=length, **({} if model.config.is_causal else {"block_length": length}))
    undecided = canvas == mask
    steps = unmask_steps(canvas, undecided, real, len(prompt))
    return replace(
        some,
        canvas=canvas,
        undecided=undecided,
        unmask_step=steps,
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
    found = compare(alone, waited)
    assert found["first_divergent_step"].item() == -1
    assert found["order"].item() == pytest.approx(1.0)
    assert found["edit_distance"].item() == 0
    longer = course(tiny_llama, [["M"] * 4, [5, "M", "M", "M"], [5, 6, "M", "M"], [5, 6, end, "M"]])
    assert compare(alone, longer)["first_divergent_step"].item() == 1
    assert compare(alone, longer)["edit_distance"].item() == 1


def same_value(value, hook):
    return value.clone()


@pytest.mark.fast_cases(3)
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


@pytest.mark.fast_cases(1)
def test_effect_is_the_three_runs_and_their_two_comparisons(pair):
    base, free, replayed = pair
    found = effect(base[0].model, PROMPTS, CHANGE, **SHORT)
    for result, expected in ((found.base, base), (found.free, free), (found.replayed, replayed)):
        assert torch.equal(result.canvas, expected[0].canvas)
    assert found.free_running.equals(compare(base[0], free[0], base[1], free[1]))
    assert found.under_replay.equals(compare(base[0], replayed[0], base[1], replayed[1]))
    assert found.free_running["first_divergent_step"].max() >= 0


def test_an_effect_has_a_one_line_repr(pair):
    base, free, replayed = pair
    found = Effect(
        base[0], free[0], replayed[0], compare(base[0], free[0]), compare(base[0], replayed[0], base[1], replayed[1])
    )
    same = sum(before.text == after.text for before, after in zip(base[0].answers, free[0].answers, strict=True))
    kl = float(found.under_replay["kl"].mean())
    assert repr(found) == (
        f"Effect({same} of {len(PROMPTS)} answers stay the same, "
        f"mean KL under replay {kl:.3g} nats over {base[0].steps_run} steps)"
    )


@pytest.mark.parametrize("model", ["tiny_llada", "tiny_llama"])
def test_logits_are_kept_only_at_the_chosen_steps(request, model):
    model = request.getfixturevalue(model)
    kept, every = MaskedLogits(steps=[0, -1]), MaskedLogits()
    run = sinklens.generate(model, PROMPTS, hooks=[every, kept], record_sinks=False, **SHORT)
    assert sorted(kept.kept) == [0, 7]
    for step, logits in kept.kept.items():
        assert torch.equal(logits, every.kept[step])
        assert len(logits) == (3 if model.config.is_causal else int((run.canvas[:, step] == model.mask_token_id).sum()))
    found = compare(run, run, kept.kept, kept.kept)
    assert found["kl"].notnull().any("batch").to_numpy().nonzero()[0].tolist() == [0, 7]
    sinklens.generate(model, PROMPTS[0], hooks=[kept], record_sinks=False, gen_length=4)
    assert sorted(kept.kept) == [0, 3]


def test_a_token_ruled_out_by_both_runs_adds_nothing_to_the_kl(tiny_llada):
    """0 · log 0 is 0; a token that only the changed run rules out makes the KL infinite."""
    run = course(tiny_llada, [["M", "M"], [5, 6]])
    p, q = torch.tensor([[0.0, 1.0, -torch.inf]] * 2), torch.tensor([[1.0, 0.0, -torch.inf]] * 2)
    shares = softmax(np.array([0.0, 1.0]))
    found = compare(run, run, {0: p}, {0: q})["kl"].item()
    assert found == pytest.approx((shares * np.log(shares / shares[::-1])).sum())
    assert compare(run, run, {0: p}, {0: torch.tensor([[0.0, -torch.inf, 0.0]] * 2)})["kl"].item() == math.inf


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (PROMPTS[:2], r"same prompts and lengths; got \[3, \d+\] and \[2, \d+\] \(rows, positions\)"),
        ([PROMPTS[1], PROMPTS[0], PROMPTS[2]], r"have the same prompts; these do not"),
        ([PROMPTS[0]] * 3, r"have the same prompts"),
    ],
)
def test_runs_of_different_prompts_are_rejected(pair, other, text):
    base = pair[0][0]
    changed = sinklens.generate(base.model, other, record_sinks=False, **SHORT)
    with pytest.raises(SettingError, match=text):
        compare(base, changed)


def test_a_prompt_that_is_a_prefix_of_another_is_rejected(tiny_llada):
    """Neither the masks nor an extra token after the short prompt match the rest of the long one."""
    ids = tiny_llada.encode(PROMPTS[0])[0]
    short = sinklens.generate(tiny_llada, ids[:, :-4], record_sinks=False, gen_length=12)
    long = sinklens.generate(tiny_llada, ids, record_sinks=False, gen_length=8)
    with pytest.raises(SettingError, match="have the same prompts"):
        compare(short, long)
    longer = sinklens.generate(tiny_llada, ids, hooks=[SinkToken()], record_sinks=False, gen_length=8)
    with pytest.raises(SettingError, match=r"got \[1, \d+\] and \[1, \d+\] \(rows, positions\)"):
        compare(long, longer)


def test_attended_positions_are_reported_separately(pair):
    base, _, replayed = pair
    marked = np.random.default_rng(2).random((3, base[0].steps_run, base[0].canvas.shape[2])) < 0.4
    found = compare(base[0], replayed[0], base[1], replayed[1], attended=marked)
    both = 0
    for row, step in np.ndindex(3, base[0].steps_run):
        change = {True: [], False: []}
        for place, at in undecided(base[0], step, row):
            p, q = (softmax(run[2][step][row, at]) for run in (base, replayed))
            change[bool(marked[row, step, place])].append(q.max() - p.max())
        for name, numbers in (("change_attended", change[True]), ("change_rest", change[False])):
            expected = np.mean(numbers) if numbers else math.nan
            assert float(found[name][row, step]) == pytest.approx(expected, abs=1e-9, nan_ok=True)
        both += bool(change[True]) and bool(change[False])
    assert both > 5 or base[0].model.config.is_causal
    with pytest.raises(SettingError, match="which needs the logits of both runs; pass them, too"):
        compare(base[0], replayed[0], attended=marked)


@pytest.fixture(scope="module")
def masked(tiny_llada):
    """A run whose strongest keys are masked in some layers and heads, and its patterns by (step, layer)."""
    patterns = {}

    def keep(value, hook):
        patterns[hook.step, hook.layer()] = value.clone()

    change = MaskSinks(top_k=2, layers=[0, -1], heads=[1, 4], steps=range(2, 8))
    run = sinklens.generate(
        tiny_llada, PROMPTS, hooks=[change, (lambda name: name.endswith("hook_pattern"), keep)], **SHORT
    )
    return change, run, patterns


def test_attention_to_keys_is_the_mean_over_heads_and_layers_of_the_unchanged_model(masked):
    change, run, _ = masked
    keys = change.keys(run)
    found = attention_to(run, keys, steps=[3, 6])
    for step in (3, 6):
        _, cache = run.model.run_with_cache(run.canvas[:, step], attention_mask=run.real)
        for row in range(3):
            for query in range(run.canvas.shape[2]):
                if not run.real[row, query]:
                    continue
                total = 0.0
                for layer in range(4):
                    pattern = cache[f"blocks.{layer}.attn.hook_pattern"][row, :, query].double().numpy()
                    total += (pattern * keys.to_numpy()[row, step, layer]).sum()
                assert found[row, step, query] == pytest.approx(total / 24, abs=1e-6)
    assert np.isnan(found[:, [0, 1, 2, 4, 5, 7]]).all()
    assert not run.real.all()
    assert np.isnan(found[:, 3][~run.real.numpy()]).all()
    assert np.nanmax(found) > 0.05


def test_attention_to_keys_of_an_autoregressive_run_covers_decoded_positions_only(tiny_llama):
    run = sinklens.generate(tiny_llama, PROMPTS, gen_length=4)
    everything = run.sinks.scores().notnull()
    found = attention_to(run, everything)
    for step in range(4):
        known = run.prompt_length + step
        np.testing.assert_allclose(found[:, step, :known][run.real[:, :known].numpy()], 1.0, atol=1e-5)
        assert np.isnan(found[:, step, known:]).all()


def test_masked_logits_need_a_run(tiny_llada):
    with pytest.raises(SettingError, match="use MaskedLogits in a run of several steps"):
        MaskedLogits().hooks_for(tiny_llada)


def test_logits_of_one_run_or_of_other_steps_are_rejected(masked):
    _, run, _ = masked
    logits = {1: torch.zeros(1, 3)}
    for given in ((logits, None), (None, logits)):
        with pytest.raises(SettingError, match="pass both base_logits and changed_logits, or neither"):
            compare(run, run, *given)
    with pytest.raises(
        SettingError, match=r"no step has the logits of both runs: base_logits holds steps \[1\], .* \[2\]"
    ):
        compare(run, run, logits, {2: torch.zeros(1, 3)})


def test_attention_to_keys_of_some_steps_uses_their_step_numbers(masked):
    """Not their indices: keys of steps 3 and 6 are at indices 0 and 1."""
    change, run, _ = masked
    keys = change.keys(run)
    complete, part = attention_to(run, keys), attention_to(run, keys.isel(step=[3, 6]))
    np.testing.assert_array_equal(part[:, [3, 6]], complete[:, [3, 6]])
    assert np.isnan(part[:, [0, 1, 2, 4, 5]]).all()
    np.testing.assert_array_equal(attention_to(run, keys, steps=[-1])[:, -1], complete[:, -1])
    assert not np.isnan(complete[:, -1]).all()


@pytest.mark.parametrize(
    ("part", "steps", "text"),
    [
        ({}, [99], "step 99 does not exist; there are"),
        ({"step": [2, 3]}, [1], r"keys has no step 1; choose from \[2, 3\]"),
        ({"layer": [3]}, None, r"keys has .*'layer': 1.*, this run .*'layer': 4.*; pass keys of this run"),
        ({"head": [3]}, None, "pass keys of this run, with all its layers and heads"),
        ({"batch": [0]}, None, "pass keys of this run"),
        ({"pos": slice(3)}, None, "pass keys of this run"),
    ],
)
def test_keys_that_do_not_belong_to_the_run_are_rejected(masked, part, steps, text):
    change, run, _ = masked
    with pytest.raises(SettingError, match=text):
        attention_to(run, change.keys(run).isel(part), steps)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("other", ["Question: 1 + 1?", None, torch.zeros(1, 2, 3)], ids=["text", "None", "canvases"])
def test_what_is_not_a_run_is_refused_by_name(pair, other):
    (base, *_), _, _ = pair
    calls = {
        "base": [
            lambda: compare(other, base),
            lambda: corrupted(other, {"a": "b"}),
            lambda: sinks_compared(other, base),
        ],
        "changed": [lambda: compare(base, other), lambda: sinks_compared(base, other)],
        "run": [lambda: logit_lens(base.model, other), lambda: attention_to(other, base), lambda: of_step(other, 0)],
    }
    for name, refused in calls.items():
        for call in refused:
            with pytest.raises(SettingError, match=rf"{name} must be a run, .* got {type(other).__name__}\."):
                call()


@pytest.mark.usefixtures("unchecked")
def test_a_trace_is_compared_like_a_run(tiny_llada):
    with sinklens.trace(tiny_llada, PROMPTS[0], record_sinks=False, **SHORT) as t:
        for _ in t.steps:
            pass
    assert bool(compare(t, t)["same_answer"].all())
