"""The trace: steps, names, edits, results, and every error with its text."""

import traceback
import warnings

import numpy as np
import pytest
import torch
from asked import PROMPT

import sinklens
from sinklens.errors import (
    HookFunctionError,
    HookNameError,
    HookOrderError,
    PromptError,
    PromptWarning,
    ReadOnlyHookError,
    SettingError,
    SinklensError,
)
from sinklens.sinks import motion

PATTERN, SCORES = "blocks.2.attn.hook_pattern", "blocks.0.attn.hook_sink_scores"
RESID = "blocks.0.hook_resid_pre"
BRIEF = {"gen_length": 8}  # settings of a run of 8 steps


@pytest.fixture(scope="module")
def base(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPT)


def test_a_block_visits_every_step_and_reads_its_values(tiny_llada, base):
    visited, patterns = [], []
    t = sinklens.trace(tiny_llada, PROMPT)  # may be created before its block

    def width():
        return t["hook_embed"].shape[-1]

    with t:
        for step in t.steps:
            visited.append((step, t.step, width()))
            by_attribute = t.blocks[2].attn.hook_pattern.output
            patterns.append(t[PATTERN])
            raw = t.hf.model.layers[3].mlp.output
            kept = t["blocks.3.hook_resid_post"].save()
        after = "ran"
    d_model = tiny_llada.cfg.d_model
    assert (visited, after) == ([(n, n, d_model) for n in range(24)], "ran")
    assert torch.equal(t.canvas, base.canvas)
    assert t.text == base.text
    assert torch.equal(t.unmask_step, base.unmask_step)
    for step in (0, 7, 23):
        _, cache = tiny_llada.run_with_cache(base.canvas[:, step], names_filter=PATTERN)
        torch.testing.assert_close(patterns[step], cache[PATTERN], atol=1e-5, rtol=1e-5)
    assert by_attribute is patterns[-1]
    assert raw.shape[-1] == kept.shape[-1] == d_model
    with pytest.raises(SinklensError, match=r"this trace has already run"):
        with t:
            t["hook_embed"]


@pytest.mark.parametrize("select", [lambda t: t.steps, lambda t: t.iter[:], lambda t: t.steps[[0, 23]]])
def test_a_loop_ends_with_a_run_that_ends_early_and_a_replay_ends_with_it(tiny_llada, select):
    visited = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sinklens.trace(tiny_llada, PROMPT, threshold=0.5, record_sinks=False) as t:
            for step in select(t):
                visited.append(step)
            result, after = t.result, len(visited)
    assert visited == [step for step in select(sinklens.trace(tiny_llada, PROMPT))._chosen if step < t.steps_run]
    assert after == len(visited)
    assert result is t.generation
    assert t.steps_run < 24
    assert torch.equal(sinklens.generate(tiny_llada, PROMPT, replay=t, record_sinks=False).canvas, t.canvas)


def test_an_in_place_edit_and_an_assignment_take_effect(tiny_llada):
    with sinklens.trace(tiny_llada, PROMPT, **BRIEF) as t:
        for _ in t.steps:
            t[PATTERN][:, 3] = 0
            z = t["blocks.2.attn.hook_z"]
    assert z[:, :, 3].abs().max() == 0
    assert z[:, :, 2].abs().max() > 0
    with sinklens.trace(tiny_llada, PROMPT, **BRIEF) as assigned:
        for _ in assigned.steps:
            pattern = assigned[PATTERN].clone()
            pattern[:, 3] = 0
            assigned[PATTERN] = pattern
    plain = sinklens.generate(tiny_llada, PROMPT, **BRIEF)
    assert torch.equal(t.canvas, assigned.canvas)
    np.testing.assert_array_equal(t.sinks["score"], assigned.sinks["score"])
    assert (t.sinks["score"] != plain.sinks["score"]).any()


def test_a_hook_function_knows_its_step_and_can_choose_it(tiny_llada, base):
    steps = []

    def at_step_five(value, hook):
        steps.append(hook.step)
        return value * 0 if hook.step == 5 else value

    run = sinklens.generate(tiny_llada, PROMPT, hooks=[("blocks.0.hook_resid_post", at_step_five)])
    assert steps == list(range(run.steps_run))
    assert torch.equal(run.canvas[:, :6], base.canvas[:, :6])
    assert not torch.equal(run.canvas, base.canvas)
    assert tiny_llada.tree.blocks[0].hook_resid_post.step is None


@pytest.mark.parametrize(("at", "masks"), [(6, 18), (0, 24)])
def test_stopping_keeps_the_finished_steps(tiny_llada, base, at, masks):
    with sinklens.trace(tiny_llada, PROMPT) as t:
        for step in t.steps:
            if step == at:
                t.stop()
    assert (t.steps_run, t.answers[0].masks) == (at, masks)
    assert torch.equal(t.canvas, base.canvas[:, : at + 1])
    assert (t.sinks.steps if at else t.sinks) == (at or None)


def test_replay_forces_the_earlier_canvas_and_isolates_the_effect_of_each_step(tiny_llada, base):
    logits = []
    hooks = [
        ("blocks.3.hook_resid_post", lambda value, hook: value * 0),
        ("denoise.hook_logits", lambda value, hook: logits.append(value)),
    ]
    assert torch.equal(sinklens.generate(tiny_llada, PROMPT, hooks=hooks, replay=base).canvas, base.canvas)
    alone = tiny_llada.run_with_hooks(base.canvas[:, 9], fwd_hooks=hooks[:1])
    torch.testing.assert_close(logits[9], alone, atol=1e-5, rtol=1e-5)
    assert not torch.equal(sinklens.generate(tiny_llada, PROMPT, hooks=hooks[:1]).canvas, base.canvas)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_an_in_place_canvas_edit_under_replay_does_not_change_the_earlier_run(name):
    model = sinklens.load(name)
    earlier = sinklens.generate(model, PROMPT, **BRIEF)
    kept = earlier.canvas.clone()
    with sinklens.trace(model, PROMPT, replay=earlier, **BRIEF) as t:
        for _ in t.steps[3:]:
            t["denoise.hook_canvas"][:, 2] = 5
    assert torch.equal(earlier.canvas, kept)
    assert t.canvas[0, 4, 2] == 5


def test_a_replayed_canvas_can_be_changed(tiny_llada, base):
    """A token that the run decided late is filled in from step 4 on."""
    canvas, seen = base.canvas.clone(), {}
    late = int((base.unmask_step[0] >= 12).nonzero()[0])
    canvas[:, 4:, late] = base.tokens[:, late, None]
    keep = ("denoise.hook_logits", lambda value, hook: seen.update({hook.step: value.clone()}))
    run = sinklens.generate(tiny_llada, PROMPT, hooks=[keep], replay=canvas.int())
    assert not torch.equal(canvas, base.canvas)
    assert torch.equal(run.canvas, canvas)
    with torch.no_grad():
        for step in (3, 4, 20):
            torch.testing.assert_close(seen[step], tiny_llada(canvas[:, step]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"replay": lambda canvas: canvas[0]}, r"integers \[batch, steps \+ 1, pos\].* got torch\.int64 \[25, 48\]"),
        ({"replay": lambda canvas: canvas.float()}, r"got torch\.float32 \[1, 25, 48\]"),
        ({"replay": lambda canvas: canvas - 1}, r"token ids from -1 to \d+; allowed are 0 to \d+"),
        ({"replay": lambda canvas: canvas + 10_000}, r"token ids from 10\d{3} to \d+; allowed are 0 to"),
        ({"replay": lambda canvas: canvas[..., 1:]}, r"replay holds 1 rows of 47 positions, this run 1 of 48"),
        ({"replay": lambda canvas: canvas.repeat(1, 2, 1)}, r"replay has 49 steps, this run at most 24"),
        ({"replay": lambda canvas: canvas[:, 1:]}, r"replay began from another canvas"),
        ({"prompts": [PROMPT, PROMPT]}, r"replay holds 1 rows of \d+ positions, this run 2"),
        ({"gen_length": 12, "block_length": 12}, r"replay holds 1 rows"),
        ({"steps": 12}, r"replay has 24 steps, this run at most 12"),
        ({"prompts": PROMPT.replace("has", "had")}, r"replay"),
    ],
)
def test_a_replay_that_does_not_fit_is_rejected(tiny_llada, base, change, text):
    given = {"prompts": PROMPT, **change}
    given["replay"] = given["replay"](base.canvas) if "replay" in change else base
    with pytest.raises(SettingError, match=text):
        sinklens.generate(tiny_llada, **given)


def test_an_autoregressive_replay_with_a_gap_is_rejected(tiny_llama):
    base = sinklens.generate(tiny_llama, PROMPT)
    canvas = base.canvas.clone()
    canvas[:, 5, base.prompt_length + 2] = -1
    with pytest.raises(SettingError, match=rf"no token at position {base.prompt_length + 2} of step 5 \(row 0\)"):
        sinklens.generate(tiny_llama, PROMPT, replay=canvas)


@pytest.fixture(scope="module")
def streams(tiny_llada):
    """The stream of each step of a brief run, from a hook function."""
    kept = {}
    keep = (RESID, lambda value, hook: kept.update({hook.step: value}))
    sinklens.generate(tiny_llada, PROMPT, hooks=[keep], record_sinks=False, **BRIEF)
    return kept


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("select", "steps"),
    [
        (lambda t: t.iter[2:4], [2, 3]),
        (lambda t: t.iter[1], [1]),
        (lambda t: t.iter[[0, 2, 4]], [0, 2, 4]),
        (lambda t: t.iter[:3], [0, 1, 2]),
        (lambda t: t.iter[:], list(range(8))),
        (lambda t: t.all(), list(range(8))),
        (lambda t: tiny(t).iter[2:4], [2, 3]),
        (lambda t: t.blocks[0].hook_resid_pre.iter[[1, 3]], [1, 3]),
        (lambda t: t.steps[::3], [0, 3, 6]),
        (lambda t: t.steps[2::-1], [0, 1, 2]),
        (lambda t: t.steps[[5, 0]], [0, 5]),
        (lambda t: t.steps[-1], [7]),
        (lambda t: t.steps.at(0.0, 0.5, 1.0), [0, 4, 7]),
        (lambda t: t.steps[8:], []),
    ],
)
@pytest.mark.filterwarnings("ignore:model.iter is deprecated")
def test_selections_visit_their_steps_at_points_that_no_hook_watched_before(tiny_llada, streams, select, steps):
    seen = []
    with sinklens.trace(tiny_llada, PROMPT, record_sinks=False, **BRIEF) as t:
        for step in select(t):
            right = torch.equal(t[RESID], streams[step])
            seen.append((step, t.step, right))
            t["blocks.2.hook_resid_post"]
    assert seen == [(step, step, True) for step in steps]
    assert len(streams) == t.steps_run == 8


def tiny(t):
    """The model of a trace, whose `iter` is nnsight's."""
    return t._denoising.model


@pytest.mark.parametrize(("key", "chosen"), [
    (slice(None, None, 8), [0, 8, 16]), (torch.tensor([5, -1]), [5, 23]), (torch.tensor([5, -1]).numpy(), [5, 23]),
    ((5, 23), [5, 23]), ({23, 5}, [5, 23]), (range(5, 24, 18), [5, 23]), (torch.tensor(2), [2]),
    (torch.tensor([2]).numpy()[0], [2]), (-22, [2]),
])  # fmt: skip
def test_steps_are_selected_by_integers_and_collections_of_them(tiny_llada, key, chosen):
    steps = sinklens.trace(tiny_llada, PROMPT).steps
    assert (len(steps), len(steps[key]), repr(steps[key])) == (24, len(chosen), f"VisitedSteps({chosen})")


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.stop(), r"t\.stop\(\) was called outside its .* block; call it inside the block"),
        (lambda t: t.cache("hook_embed"), r"call it inside the `with sinklens.trace"),
        (lambda t: t["hook_embed"], r"only during the run.*t.canvas, t.sinks and t.text remain"),
        (lambda t: list(t.steps), r"only inside the `with sinklens.trace"),
    ],
)
def test_what_only_a_block_can_do_is_refused_outside(tiny_llada, call, text):
    with pytest.raises(HookOrderError, match=text):
        call(sinklens.trace(tiny_llada, PROMPT))
    assert not tiny_llada.tree.hook_dict["hook_embed"].watched


@pytest.mark.parametrize(
    ("point", "change", "text"),
    [
        (
            "confidence",
            lambda value: value * 0.5,
            r"decides nothing with this sampler.*Edit denoise.hook_candidates to",
        ),
        ("confidence", lambda value: value.zero_(), r"hook_confidence decides nothing with this sampler"),
        ("commit", torch.zeros_like, r"hook_commit of an autoregressive model cannot be False"),
    ],
)
def test_a_decision_that_an_autoregressive_step_does_not_take_cannot_be_edited(tiny_llama, point, change, text):
    with pytest.raises(ReadOnlyHookError, match=text):
        sinklens.generate(tiny_llama, PROMPT, hooks=[(f"denoise.hook_{point}", lambda value, hook: change(value))])


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (lambda t: t["blocks.2.attn.hook_patern"], HookNameError, r"hook_patern'. Nearest: blocks.2.attn.hook_pattern"),
        (lambda t: t["blocks.9.attn.hook_pattern"], HookNameError, r"layer 9 does not exist; this model has 4"),
        (lambda t: t.steps[8], SettingError, r"step 8 does not exist; there are 8, 0 to 7"),
        (lambda t: t.steps[[0, -9]], SettingError, r"step -9 does not exist"),
        (lambda t: t.steps[True], SettingError, r"steps must be a list of integers, .*; got \[True\]"),
        (lambda t: t.steps[torch.ones(8, dtype=torch.bool)], SettingError, r"steps must be a list of integers"),
        (lambda t: t.steps[1.0], SettingError, r"steps must be a list of integers, .*; got \[1.0\]"),
        (lambda t: t.steps["3"], SettingError, r"steps must be a list of integers"),
        (lambda t: t.steps[0.5:], TypeError, r"slice indices must be integers"),
        (lambda t: t.steps[[]], SettingError, r"t.steps\[\[\]\] selects no step"),
        (lambda t: t.steps.at(), SettingError, r"selects no step"),
        (lambda t: t.steps[4:][0], SettingError, r"is already a selection; select from t.steps itself"),
        (lambda t: t.cache(modules=["model.blocks.0.hook_z"]), HookNameError, r"no module has the path"),
        (lambda t: t.cache(modules=["blocks.0.attn.hook_z"]), HookNameError, r"Nearest: model.blocks.0.attn.hook_z"),
        (lambda t: t.cache("hook_embed", steps=[]), SettingError, r"steps is empty"),
        (lambda t: t.cache("hook_embed", device="cpu"), SettingError, r"other options are those of nnsight's"),
        (lambda t: t.cache("hook_embed", steps=[8]), SettingError, r"step 8 does not exist; there are 8"),
        (lambda t: t.cache("hook_embd"), HookNameError, r"hook_embd"),
        (lambda t: t.cache(steps=[1]), SettingError, r"steps= requires names of hook points"),
        (lambda t: t.__setitem__("hook_embed", 0), HookFunctionError, r"assigned to t\['hook_embed'\] is int, but the"),
        (lambda t: t.__setitem__("hook_embed", torch.zeros(1, 1, 192)), HookFunctionError, r"\[1, 1, 192\], but the"),
        (lambda t: t.barrier(2)(), ValueError, r"A barrier was never reached"),
        (lambda t: t.steps.at(1.5), SettingError, r"between 0 and 1; got 1.5"),
        (lambda t: t[PATTERN][:, 6], IndexError, r"index 6 is out of bounds"),
        (lambda t: t.text, HookOrderError, r"t.text is available after the run"),
        (lambda t: t.scores, AttributeError, r"no attribute 'scores'; read hook points as .*, sinks as t\.sinks"),
        (lambda t: t.blocks[0].attn.output, HookOrderError, r"'blocks.0.attn' holds hook points"),
        (lambda t: t.__setitem__(SCORES, t[SCORES] * 0), ReadOnlyHookError, r"only reports what .*hook_attn_mask"),
        (lambda t: [t["blocks.2.hook_resid_post"], t["blocks.1.attn.hook_pattern"]], HookOrderError, r"in step 0"),
        (lambda t: [*t.steps, t["hook_embed"]], HookOrderError, r"after the run had ended; it had 8"),
        (lambda t: [*t.steps, *t.steps], HookOrderError, r"step 0 was requested, but the run has already"),
        (lambda t: [*t.steps, *t.steps[-1]], HookOrderError, r"step 7 was requested, but the run has al"),
        (lambda t: [[*t.steps[:3]] for _ in t.steps[:3]], HookOrderError, r"1 was requested, .* already at step 3"),
        (lambda t: [*t.steps[:5], *t.steps[2:]], HookOrderError, r"step 2 was requested, .* already at step 5"),
        (lambda t: [*t.steps[[7]], t.cache("hook_embed")], HookOrderError, r"keeps values computed after the"),
        (lambda t: t.stop(), SinklensError, r"the run stopped before it began; nothing was generated"),
        (lambda t: [[t["hook_embed"], t[RESID], t["hook_embed"]] for _ in tiny(t).iter[2:4]], HookOrderError, "step 2"),
        (lambda t: [sinklens.generate(tiny(t), PROMPT) for _ in t.steps[:1]], HookOrderError, "tiny-llada is running"),
        (lambda t: [tiny(t).output.logits for _ in t.steps[:1]], HookOrderError, r"t\['denoise.hook_logits'\]"),
        (lambda t: [t["logits"] for _ in t.steps[:1]], HookNameError, r"Nearest: denoise\.hook_logits\."),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:model.iter is deprecated")
def test_what_a_block_cannot_ask_for_is_refused(tiny_llada, body, error, text):
    with pytest.raises(error, match=text):
        with sinklens.trace(tiny_llada, PROMPT, record_sinks=False, **BRIEF) as t:
            body(t)


def test_a_forward_pass_inside_a_block_does_not_affect_the_run_and_another_run_is_rejected(tiny_llada, base):
    with sinklens.trace(tiny_llada, PROMPT) as t:
        for step in t.steps[:3]:
            resid = t["blocks.1.hook_resid_pre"]
            logits = tiny_llada(base.canvas[:, step])
    assert (logits.shape[-1], resid.shape[-1]) == (tiny_llada.cfg.d_vocab, tiny_llada.cfg.d_model)
    assert torch.equal(t.canvas, base.canvas)
    with pytest.raises(HookOrderError, match=r"a trace block of tiny-llada is running"):
        with sinklens.trace(tiny_llada, PROMPT) as t:
            for _ in t.steps[:1]:
                with sinklens.trace(tiny_llada, PROMPT) as inner:
                    inner["hook_embed"]


def test_an_error_in_the_block_shows_its_line_and_leaves_the_model_unchanged(tiny_llada, base):
    ids = base.canvas[:, 4]
    before = tiny_llada(ids)
    with pytest.raises(ZeroDivisionError, match=r"division by zero") as caught:
        with sinklens.trace(tiny_llada, PROMPT, hooks=[("hook_embed", lambda value, hook: value * 2)]) as t:
            for step in t.steps:
                t[PATTERN][:] = 0
                if step == 2:
                    1 / 0  # noqa: B018
    assert any("1 / 0" in frame.line for frame in traceback.extract_tb(caught.value.__traceback__))
    assert torch.equal(tiny_llada(ids), before)
    assert not any(point.watched for point in tiny_llada.tree.hook_points())
    assert torch.equal(sinklens.generate(tiny_llada, PROMPT).canvas, base.canvas)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: value.double(), "is float64 on cpu, but the value at this point is float32 on cpu"),
        (lambda value: value.half(), "is float16 on cpu, but"),
        (lambda value: value.to("meta"), "is float32 on meta, but"),
        (lambda value: value[:, :1], r"is \[1, 1, 192\], but .* has shape \[1, \d+, 192\]"),
        (lambda value: 3, "is int, but"),
    ],
)
def test_a_value_of_another_shape_dtype_or_device_is_named(tiny_llada, change, text):
    def other_kind(value, hook):
        return change(value)

    with pytest.raises(HookFunctionError, match=rf"other_kind .*at blocks.1.* \(step 0\) .*{text}"):
        sinklens.generate(tiny_llada, PROMPT, hooks=[("blocks.1.hook_resid_post", other_kind)])
    with pytest.raises(HookFunctionError, match=rf"the value assigned to t\['hook_embed'\] {text}"):
        with sinklens.trace(tiny_llada, PROMPT) as t:
            for _ in t.steps:
                t["hook_embed"] = change(t["hook_embed"])


@pytest.mark.parametrize("model", ["tiny_llada", "tiny_llama"])
@pytest.mark.parametrize("name", ["denoise.hook_canvas", "denoise.hook_candidates"])
@pytest.mark.parametrize("token", [-1, 643])
def test_a_token_id_outside_the_vocabulary_is_named(request, model, name, token):
    def write(value, hook=None):
        value = value.clone()
        value[:, -1] = token
        return value

    model = request.getfixturevalue(model)
    mask = "" if model.causal else r" To mask a position, write \d+, model.mask_token_id."
    text = rf"wrote the token id {token} at {name} \(step 0, row 0, column \d+\); .* 643 .* ids 0 to 642\.{mask}$"
    with pytest.raises(HookFunctionError, match=text):
        sinklens.generate(model, PROMPT, hooks=[(name, write)])
    with pytest.raises(HookFunctionError, match=text):
        with sinklens.trace(model, PROMPT) as t:
            for _ in t.steps:
                t[name] = write(t[name])


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "text"),
    [
        ("a <|mdm_mask|> b", {}, PromptError, r"prompt 0 contains the mask token \(1\) at position 3"),
        (PROMPT * 5, {}, PromptError, r"has 128 positions, and a pass would need 1\d\d.*gen_length to at most \d+\)"),
        ([9] * 200, {}, PromptError, r"has 200 tokens and gen_length is 24: shorten the prompt by 96; .*allow_longer"),
        (PROMPT, {"chat_template": True}, PromptError, r"no chat template. Leave chat_template \(--chat\) out; in Pyt"),
        (PROMPT, {"gen_length": 0}, SettingError, r"at least 1; got 0"),
        (PROMPT, {"block_length": 7}, SettingError, r"block_length 7 does not divide gen_length 24"),
        (PROMPT, {"steps": 5, "block_length": 8}, SettingError, r"steps 5 cannot be divided among 3 blocks"),
        (PROMPT, {"stesp": 5}, SettingError, r"Nearest: steps"),
        (PROMPT, {"hooks": [("hook_embd", print)]}, HookNameError, r"Nearest: hook_embed"),
        (PROMPT, {"hooks": [(["hook_embed"], print)]}, HookNameError, r"named by a text, .*; got \['hook_embed'\]"),
        (PROMPT, {"hooks": [(lambda name: False, print)]}, HookNameError, r"matches none of the 104 hook points"),
        (PROMPT, {"hooks": [("hook_embed", lambda value: value)]}, HookFunctionError, r"<lambda> cannot be called"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_an_invalid_prompt_or_setting_is_rejected_before_anything_runs(tiny_llada, prompt, settings, error, text):
    with pytest.raises(error, match=text):
        sinklens.generate(tiny_llada, prompt, **settings)


def test_a_rotary_network_runs_beyond_its_context_if_asked(tiny_llada):
    ids, longer = [9] * 140, {"gen_length": 8, "steps": 2, "block_length": 8, "allow_longer": True}
    with pytest.warns(PromptWarning, match=r"has 128 positions, and a pass would need 148, 20 too many"):
        run = sinklens.generate(tiny_llada, ids, **longer)
    with pytest.warns(PromptWarning, match=r"20 too many"), sinklens.trace(tiny_llada, ids, **longer) as t:
        for _ in t.steps:
            assert t["denoise.hook_logits"] is not None
    assert torch.equal(t.canvas, run.canvas)
    with pytest.warns(PromptWarning, match=r"20 too many"):
        assert torch.isfinite(tiny_llada(run.canvas[:, 1], allow_longer=True)).all()


def test_code_without_source_gets_an_error_that_names_the_alternative(tiny_llada):
    code = "with sinklens.trace(model, prompt) as t:\n    for step in t.steps:\n        x = t['hook_embed']\n"
    with pytest.raises(SinklensError, match=r"<nowhere> has no source.*sinklens.generate\(\.\.\., hooks="):
        exec(compile(code, "<nowhere>", "exec"), {"sinklens": sinklens, "model": tiny_llada, "prompt": PROMPT})


def test_answers_record_whether_they_ended_or_are_empty(tiny_llada):
    run = sinklens.generate(tiny_llada, PROMPT)
    assert run.answers[0].ended
    assert not run.answers[0].empty
    end = tiny_llada.eos_token_ids[0]
    empty = sinklens.generate(
        tiny_llada, PROMPT, hooks=[("denoise.hook_candidates", lambda value, hook: torch.where(value == 1, value, end))]
    )
    assert (empty.answers[0].empty, empty.answers[0].ended) == (True, True)
    assert "1 empty" in repr(empty)


@pytest.mark.usefixtures("unchecked")
def test_a_run_in_place_of_its_track_is_an_error_that_names_the_track(base):
    with pytest.raises(AttributeError, match=r"a run has no attribute 'scores', but run\.sinks has; pass it\."):
        motion.jumps(base)


def test_a_list_of_prompts_gives_a_list_of_texts_and_ids_give_rows(tiny_llada):
    ids, _ = tiny_llada.encode(PROMPT)
    texts, text, rows = (sinklens.generate(tiny_llada, given, **BRIEF).text for given in ([PROMPT], PROMPT, ids[0]))
    assert texts == [text] == rows


def test_a_run_of_an_edited_model_is_rejected_because_it_would_drop_the_edit(tiny_llada):
    with tiny_llada.edit() as (_, edited):
        edited.blocks[0].attn.hook_z.output[:] = 0
    for start in (sinklens.generate, sinklens.trace):
        with pytest.raises(SinklensError, match=r"edits from model.edit\(\), which act in single traces"):
            start(edited, PROMPT)
    assert sinklens.generate(tiny_llada, PROMPT, steps=1, gen_length=1, progress=False).steps_run == 1
