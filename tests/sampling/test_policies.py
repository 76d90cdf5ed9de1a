"""A step under a policy equals plain torch that takes stale keys and values from its own earlier passes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from asked import WORDS as PROMPTS
from building import plain_pass

import sinklens
from sinklens.errors import ReadOnlyHookError, SettingError
from sinklens.experiments import LogitLens, donors
from sinklens.families import SAMPLERS
from sinklens.interventions import AblateHeads, AblateValues, MaskSinks
from sinklens.sampling import (
    DelayedCache,
    DualCache,
    History,
    KeepSinks,
    Keys,
    NoCache,
    Planned,
    Policy,
    PrefixCache,
    Refresh,
    Sampler,
)
from sinklens.sampling.policies import find_policy, policy_name
from sinklens.sinks import Record, TopK

SETTINGS = {"llama": {"gen_length": 12, "block_length": 6}, "qwen3": {"gen_length": 12, "block_length": 6}}
SETTINGS["dream"] = {"gen_length": 10}


@dataclass(frozen=True)
class AtRandom(Policy):
    """Per row, layer and position, one of the three; the block is mostly computed."""

    seed: int = 0

    def plan(self, history: History) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + history.step)
        plan = torch.randint(0, 3, history.age.shape, generator=generator)
        return torch.where(history.in_block & (plan == Keys.GONE), int(Keys.FRESH), plan)


@dataclass(frozen=True)
class Returns(Policy):
    """Everything fresh in step 0, then `value`."""

    value: object

    def plan(self, history: History) -> torch.Tensor:
        return self.value if history.step else torch.ones(1, dtype=torch.bool)  # type: ignore[return-value]


EVERYTHING = Returns(torch.ones(1, dtype=torch.bool))
POLICIES = [
    PrefixCache(), DualCache(), DelayedCache(refresh=4), Refresh(every=3),
    KeepSinks(TopK(2)), ~KeepSinks(TopK(2), others="gone"),
    AtRandom(),
]  # fmt: skip


def run_under(policy, model, name, **more):
    """A run, with the values of some points by step, and the plan that the policy got."""
    seen: dict[str, dict[int, torch.Tensor]] = {}

    def keep(value, hook):
        seen.setdefault(hook.name, {})[hook.step] = value.clone()

    ends = ("hook_fresh", "hook_pattern", "hook_logits", "hook_sink_scores", "attn.hook_k", "attn.hook_v")
    hooks = [(lambda point: point.endswith(ends), keep), *more.pop("hooks", [])]
    return sinklens.generate(model, PROMPTS, cache=policy, hooks=hooks, **SETTINGS[name], **more), seen


class Plain:
    """The passes of a run in plain torch, with the keys and values of all columns after each."""

    def __init__(self, model, real):
        self._model, self._real = model, real
        self.kept: dict[str, torch.Tensor] = {}

    def step(self, canvas, fresh, visible):
        """One pass; `fresh` and `visible` are [batch, layer, pos]."""
        layers, edited = range(self._model.cfg.n_layers), {}

        def kept(name, layer):
            def replace(value):
                self.kept[name] = torch.where(fresh[:, layer, :, None, None], value, self.kept.get(name, value))
                return self.kept[name]

            return replace

        for layer in layers:
            hidden = torch.where(visible[:, layer], 0.0, -torch.inf)[:, None, None]
            edited |= {
                f"blocks.{layer}.attn.{point}": kept(f"{point}{layer}", layer) for point in ("hook_rot_k", "hook_v")
            }
            edited[f"blocks.{layer}.attn.hook_attn_mask"] = lambda value, hidden=hidden: value + hidden
        with torch.no_grad():
            return plain_pass(self._model, canvas, self._real, edited)


def assert_same(found, expected, where):
    torch.testing.assert_close(found[where], expected[where], atol=2e-4, rtol=1e-4)


PAIRS = [(name, policy) for number, policy in enumerate(POLICIES[:-1]) for name in [list(SETTINGS)[number % 3]]]
PAIRS += [(name, POLICIES[-1]) for name in SETTINGS]  # plans at random on every model, each policy on one


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("name", "policy"), PAIRS, ids=repr)
def test_every_step_equals_plain_torch_with_keys_of_earlier_steps(worded, name, policy):
    model = worded(name)
    run, seen = run_under(policy, model, name)
    plain, layers, length = Plain(model, run.real), range(model.cfg.n_layers), run.canvas.shape[2]
    some_stale = some_gone = False
    for step in range(run.steps_run):
        fresh = torch.stack([seen[f"blocks.{layer}.attn.hook_fresh"][step] for layer in layers], dim=1)
        assert not (fresh & ~run.real[:, None]).any()
        staleness = torch.from_numpy(run.sinks["staleness"].to_numpy()[:, step])
        visible = (staleness >= 0) & run.real[:, None]
        computed = fresh.any(dim=1)
        columns = computed.any(dim=0).nonzero()[:, 0]
        window = slice(int(columns[0]), int(columns[-1]) + 1)
        expected = plain.step(run.canvas[:, step], fresh, visible)
        logits = expected.logits
        if model.family_record.shift:
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        queries = computed[:, window]
        decidable = computed & run.undecided[:, step]  # of a shifted model, the position before them is computed too
        assert_same(seen["denoise.hook_logits"][step], logits[:, window], decidable[:, window])
        for layer in layers:
            at = f"blocks.{layer}.attn"
            pattern = expected.values[f"{at}.hook_pattern"]
            assert_same(
                seen[f"{at}.hook_pattern"][step].transpose(1, 2), pattern[:, :, window].transpose(1, 2), queries
            )
            counted = torch.where(computed[:, None, :, None], pattern, 0.0).sum(dim=2)
            torch.testing.assert_close(seen[f"{at}.hook_sink_scores"][step], counted, atol=2e-4, rtol=1e-4)
            assert seen[f"{at}.hook_k"][step].shape[1] == length
            assert_same(seen[f"{at}.hook_v"][step], expected.values[f"{at}.hook_v"], visible[:, layer])
        some_stale |= bool((~fresh & visible).any())
        some_gone |= bool((~visible & run.real[:, None]).any())
    assert some_stale or run.steps_run < 3
    assert some_gone == isinstance(policy, AtRandom) or policy in POLICIES[-2:]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_policy_that_computes_everything_is_the_exact_run(worded, name):
    model = worded(name)
    (exact, _), (none, _), (all_fresh, _) = (run_under(policy, model, name) for policy in (None, NoCache(), EVERYTHING))
    assert torch.equal(exact.canvas, none.canvas)
    assert torch.equal(exact.canvas, all_fresh.canvas)
    assert "fresh" not in none.sinks
    assert torch.equal(*(torch.from_numpy(run.sinks["score"].to_numpy()) for run in (exact, all_fresh)))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if not isinstance(policy, AtRandom)], ids=repr)
def test_a_row_of_a_padded_batch_equals_a_run_of_it_alone(model, policy):
    together = sinklens.generate(model, PROMPTS, cache=policy, **SETTINGS["llama"])
    for row, prompt in enumerate(PROMPTS):
        alone = sinklens.generate(model, prompt, cache=policy, **SETTINGS["llama"])
        start = together.canvas.shape[2] - alone.canvas.shape[2]
        assert torch.equal(together.canvas[row, :, start:], alone.canvas[0])
        fresh = [run.sinks["fresh"].to_numpy() for run in (together, alone)]
        assert (fresh[0][row, ..., start:] == fresh[1][0]).all()


def test_a_row_that_waits_for_others_decides_no_masks_that_earlier_blocks_kept(worded):
    model, settings = worded("llama"), {"gen_length": 12, "block_length": 6, "steps": 6}

    def fill(canvas, hook):  # the second block of the first row is finished by its first step
        if hook.step == 3:
            canvas[0, -6:] = 5
        return canvas

    finals = [
        sinklens.generate(
            model, prompts, cache=EVERYTHING, hooks=[("denoise.hook_canvas", fill)], by_quota=False, threshold=1.0,
            **settings,
        ).canvas[0, -1]
        for prompts in (PROMPTS, PROMPTS[0])
    ]  # fmt: skip
    assert torch.equal(*finals)
    assert int((finals[1] == model.mask_token_id).sum()) == 2  # of the first block


@pytest.mark.parametrize("kind", ["llama", "dream"])
def test_the_delayed_cache_reuses_a_token_from_the_second_step_after_it_was_written(worded, kind):
    """With shifted logits, from the second step after it and the token that it predicts were written."""
    run, _ = run_under(DelayedCache(refresh=4), worded(kind), kind, seed=1)
    masked, fresh = run.undecided, torch.from_numpy(run.sinks["fresh"].to_numpy()[:, :, 0])
    checked = 0
    for step in range(run.steps_run):
        inside = step % 6 if kind == "llama" else step  # Dream has no blocks
        complete = inside < 2 or inside % 4 == 0
        expected = (
            torch.ones_like(masked[:, 0]) if complete else masked[:, step - 1].clone()
        )  # undecided after step - 2
        if kind == "dream" and not complete:
            expected[:, :-1] |= masked[:, step - 1, 1:]
        assert torch.equal(fresh[:, step], expected & run.real)
        checked += not complete
    assert checked >= 4


def test_kept_sinks_are_computed_and_dropped_sinks_are_hidden(model):
    run, _ = run_under(KeepSinks(TopK(1), k=1), model, "llama")
    scores = run.sinks["score"].to_numpy()
    fresh = run.sinks["fresh"].to_numpy()
    start = run.prompt_length
    block = range(start, start + 6)
    for layer in range(model.cfg.n_layers):
        for row in range(2):
            strongest = {int(scores[row, 0, layer, head].argmax()) for head in range(model.cfg.n_heads)}
            assert set(fresh[row, 1, layer].nonzero()[0].tolist()) - set(block) <= strongest
    dropped, _ = run_under(~KeepSinks(TopK(1), others="gone"), model, "llama")
    hidden = (dropped.sinks["staleness"].to_numpy()[:, 1] < 0) & dropped.real.numpy()[:, None]
    top = dropped.sinks["score"].to_numpy()[:, 0].argmax(-1)  # [batch, layer, head]
    for row, layer, head in torch.cartesian_prod(*map(torch.arange, top.shape)).tolist():
        position = int(top[row, layer, head])
        assert hidden[row, layer, position] == (position not in block)


def test_a_layer_of_a_track_keeps_the_queries_that_other_layers_computed(worded):
    run, _ = run_under(KeepSinks(TopK(1), k=1), worded("llama"), "llama")
    fresh = run.sinks["fresh"]
    assert bool((fresh != fresh.any("layer")).any()), "the layers must compute different positions"
    for layer in fresh["layer"].to_numpy():
        alone = run.sinks.isel(layer=layer).isel(step=slice(1, None)).scores("fraction")
        xr.testing.assert_equal(alone, run.sinks.scores("fraction").isel(layer=[layer], step=slice(1, None)))


@pytest.mark.parametrize("point", ["hook_k", "hook_v"])
def test_an_edited_key_or_value_acts_in_its_step_and_is_computed_in_the_next(worded, point):
    """Position 4, in the prompts, is stale under the dual cache; a hook changes its key or value in step 2."""
    model, name = worded("qwen3"), f"blocks.1.attn.{point}"

    def edit(value, hook):
        if hook.step == 2:
            value[:, 4] += 1.0

    base, before = run_under(DualCache(), model, "qwen3")
    run, seen = run_under(DualCache(), model, "qwen3", hooks=[(name, edit)], replay=base)
    fresh_in = seen["blocks.0.attn.hook_fresh"]
    assert [bool(fresh_in[step][0, 4]) for step in range(6)] == [True, False, False, True, False, False]
    assert run.sinks["staleness"].to_numpy()[0, 1:5, :, 4].tolist() == [[1] * 3, [2] * 3, [0] * 3, [1] * 3]
    plain, kept = Plain(model, run.real), {}
    for step in range(3):
        if step == 2:
            kept = plain.kept
            if point == "hook_v":
                kept["hook_v1"][:, 4] += 1.0
            else:
                kept["hook_rot_k1"][:, 4] = rotated(model, run, seen[name][2][:, 4] + 1.0)
        fresh = torch.stack([seen[f"blocks.{layer}.attn.hook_fresh"][step] for layer in range(3)], dim=1)
        expected = plain.step(run.canvas[:, step], fresh, run.real[:, None].expand(-1, 3, -1))
    block = slice(run.prompt_length, run.prompt_length + 6)
    found = seen["denoise.hook_logits"][2]
    assert_same(found, expected.logits[:, block], torch.ones(2, 6, dtype=torch.bool))
    assert (found - before["denoise.hook_logits"][2]).abs().max() > 1e-3


def rotated(model, run, key):
    """The key `key` of position 4 in layer 1, normalized and rotated by a plain pass."""

    def put(value):
        value = value.clone()
        value[:, 4] = key
        return value

    with torch.no_grad():
        edits = {"blocks.1.attn.hook_k": put}
        return plain_pass(model, run.canvas[:, 2], run.real, edits).values["blocks.1.attn.hook_rot_k"][:, 4]


def test_hooks_blocks_masks_and_replays_work_under_a_policy(model):
    exact = sinklens.generate(model, PROMPTS, **SETTINGS["llama"])
    hooks = [MaskSinks(top_k=1), AblateHeads(layers=[1], heads=[0])]
    run, seen = run_under(DualCache(), model, "llama", hooks=hooks, replay=exact)
    assert torch.equal(run.canvas, exact.canvas)
    scores = {step: seen["blocks.2.attn.hook_sink_scores"][step] for step in range(3)}
    assert (scores[2].gather(-1, scores[1].argmax(-1)[..., None]) == 0).all()
    with sinklens.trace(model, PROMPTS[0], cache=DualCache(), **SETTINGS["llama"]) as t:
        for step in t.steps:
            fresh = t["blocks.1.attn.hook_fresh"].clone()
            pattern = t["blocks.1.attn.hook_pattern"].clone()
            if step == 2:
                break
    assert pattern.shape[-2:] == (int(fresh.sum()), fresh.shape[1])
    with pytest.raises(ReadOnlyHookError, match="only reports which keys are computed; to choose them, write a policy"):
        sinklens.generate(model, "one", gen_length=4, hooks=[("blocks.0.attn.hook_fresh", lambda v, hook: ~v)])


def test_freshness_and_staleness_are_recorded(worded):
    model, record = worded("llama"), Record(["values", "stream"])
    run = sinklens.generate(model, PROMPTS, cache=DualCache(), record_sinks=record, **SETTINGS["llama"])
    fresh, staleness = (run.sinks[name].to_numpy() for name in ("fresh", "staleness"))
    real = run.real.numpy()[:, None]  # [batch, layer, pos]
    for step in range(run.steps_run):
        expected = np.full(real.shape, step % 6)
        expected[..., run.prompt_length + step // 6 * 6 :][..., :6] = 0
        assert (staleness[:, step] == np.where(real, expected, -1)).all()
        assert (fresh[:, step] == ((expected == 0) & real)).all()
    assert run.sinks.data.attrs["cache"] == "DualCache()"
    assert run.sinks.scores("percent").sum("pos").to_numpy() == pytest.approx(100, abs=1e-2)
    assert ((run.sinks["stream_peak"].notnull()).to_numpy()[:, 1, 0].sum(-1) == [6, 6]).all()


def brief(model, cache=None, prompt="one", **given):
    return sinklens.generate(model, prompt, cache=cache, **{"gen_length": 4} | given)


LENS = {"gen_length": 8, "hooks": [LogitLens(positions=[0, 1])]}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: brief(m(), 5), r"cache must be a policy such as .*DualCache\(\) or its name, 'dual', or None; got"),
        (lambda m: brief(m(), DualCache), "cache must be a policy such as"),
        (lambda m: brief(m(), "duel"), "no cache policy is called 'duel'; known: none, prefix, dual.* Nearest"),
        (lambda m: brief(m(), "dual:3"), "'dual:3' is not a cache policy: write 'dual' alone"),
        (lambda m: brief(m(), "keep-sinks:-4"), r"is not a cache policy: .* at least 1 or None; got -4"),
        (lambda m: brief(m("llama", True), DualCache()), "DualCache is for bidirectional models; .* is autoregressive"),
        (lambda m: brief(m("sdar"), DualCache()), "is block-causal, and its steps already reuse keys exactly"),
        (lambda m: brief(m("sdar"), "dual", sampler="llada2.1"), "is block-causal, and its steps already reuse keys e"),
        (lambda m: brief(m(), DualCache(), cfg_scale=1.0), "DualCache does not support guidance; leave cfg_scale out"),
        (lambda m: brief(m("dream"), "dual", sampler="open-dcoder", alg="p2"), "alg 'p2' judges every answer position"),
        (lambda m: brief(m(), Returns("all")), r"Returns\.plan must return a tensor of Keys or booleans; got 'all'"),
        (lambda m: brief(m(), Returns(torch.ones(3).bool())), r"returned shape \[3\], which does not broadcast to \[b"),
        (lambda m: brief(m(), Returns(torch.full((1,), 5))), r"Returns\.plan returned numbers other than those of Key"),
        (lambda m: brief(m(), Returns(torch.zeros(1).bool())), r"left nothing to compute in step 1; return Keys\.FRES"),
        (lambda m: brief(m(), ByLayer(2), gen_length=3), r"Two axes are \[batch, pos\]; return a plan by layer as"),
        (lambda m: Refresh(every=2, within="dual"), "within must be a Policy; got 'dual'"),
        (lambda m: Planned(torch.ones(2, 3)), r"Planned takes a table \[batch, step, layer, pos\]; got shape \[2, 3\]"),
        (lambda m: brief(m(), Planned(torch.ones(1, 2, 1, 1).bool())), "has 2 steps, and the run reached step 2; make"),
        (lambda m: brief(m(), "dual", **LENS), "LogitLens reads complete passes, and steps .* run without cache="),
        (lambda m: brief(m("sdar"), use_cache=True, **LENS), "LogitLens reads .*, .* run with use_cache=False"),
        (lambda m: donors(m(), "one", "hook_embed", gen_length=8, cache="dual"), "donors reads exact runs"),
    ],
)  # fmt: skip
def test_what_is_no_policy_or_does_not_fit_the_run_is_refused(worded, call, text, unchecked):
    with pytest.raises(SettingError, match=text):
        call(worded)


@dataclass(frozen=True)
class Revisiting(Sampler):
    """Decides every answer token again in every step, as remasking and editing samplers do; only the last changes."""

    name = "revisiting"
    gen_length: int = 4

    def denoise(self, state):
        variable = state.canvas == state.mask_id
        for step in range(self.steps):
            yield
            canvas = state.begin_step()
            state.logits(canvas, variable)
            decided = canvas.masked_fill(variable, 5)
            decided[:, -1] = 6 + step
            state.end_step(decided)


def test_a_sampler_that_revisits_tokens_runs_where_the_policy_computes_them_and_is_refused_elsewhere(
    worded, monkeypatch
):
    """The dual cache computes the block, here the answer; the delayed cache leaves written tokens out."""
    monkeypatch.setitem(SAMPLERS, "revisiting", Revisiting)
    assert brief(worded(), DualCache(), sampler="revisiting").steps_run == 4
    with pytest.raises(SettingError, match=r"this sampler decides positions that the cache policy does not compute"):
        brief(worded(), DelayedCache(refresh=4), PROMPTS[0], sampler="revisiting")


def test_a_policy_has_the_name_that_finds_it():
    for text in ("dual", "refresh", "refresh:3", "keep-sinks:4", "drop-sinks", "delayed:2"):
        assert policy_name(find_policy(text)) == text
    unnamed = KeepSinks(TopK(1))
    assert policy_name(unnamed) == repr(unnamed)


@dataclass(frozen=True)
class ByLayer(Policy):
    """The first layer complete, the others in the block."""

    axes: int

    def plan(self, history: History) -> torch.Tensor:
        plan = history.in_block.repeat(history.age.shape[1], 1)
        plan[0] = True
        return plan if self.axes == 2 else plan[None]


def test_a_plan_with_two_axes_has_one_row_per_prompt_whatever_their_number(worded):
    model, three = worded("llama"), [PROMPTS[0]] * 3
    assert model.cfg.n_layers == 3
    fresh = sinklens.generate(model, three, cache=ByLayer(3), **SETTINGS["llama"]).sinks["fresh"]
    assert fresh.isel(step=2).sum("pos").to_numpy().tolist() == [[18, 6, 6]] * 3


def test_a_replay_that_would_run_other_steps_is_refused(worded):
    model, settings = worded("llama"), {"gen_length": 12, "block_length": 6, "steps": 4, "by_quota": False}
    base = sinklens.generate(model, PROMPTS, threshold=1.0, **settings)
    with pytest.raises(SettingError, match="by_quota=False can leave masks that a run without a cache policy decides"):
        sinklens.generate(model, PROMPTS, threshold=1.0, cache=DualCache(), replay=base, **settings)
    assert torch.equal(sinklens.generate(model, PROMPTS, threshold=1.0, replay=base, **settings).canvas, base.canvas)


def test_a_mean_value_is_that_of_the_keys_that_are_not_hidden(worded):
    seen, kept = {}, {}

    def keep(value, hook):
        kept.setdefault((hook.step, str(hook.name)), value.clone())

    names = ["blocks.0.attn.hook_v", "blocks.0.attn.hook_pattern"]
    hooks = [AblateValues(where="prompt", by="mean", layers=[0]), *((name, keep) for name in names)]
    hooks.append(("blocks.0.attn.hook_z", lambda z, hook: seen.update({hook.step: z.clone()})))
    policy = KeepSinks(TopK(2), others="gone")
    run = sinklens.generate(worded("llama"), PROMPTS[0], cache=policy, hooks=hooks, **SETTINGS["llama"])
    step, start = 3, run.prompt_length
    visible = torch.from_numpy(run.sinks["staleness"].to_numpy()[0, step, 0] >= 0)
    assert 0 < int(visible.sum()) < len(visible)
    value, pattern = (kept[step, name][0] for name in names)  # [key, kv_head, d_head], [head, query, key]
    value = value.repeat_interleave(len(pattern) // value.shape[1], dim=1)
    changed = value.clone()
    changed[:start] = value[visible].mean(dim=0)
    assert torch.allclose(seen[step][0], torch.einsum("hqk,khd->qhd", pattern, changed), atol=1e-5)
