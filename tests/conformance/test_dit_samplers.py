"""The samplers of MDLM, SEDD and BD3-LM: published rules, batches, replay and masks, beside the stored runs."""

import math
from functools import cache

import pytest
import torch
from stored.folders import largest_difference
from stored.runs import open_folder
from timed import loader

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.interventions import MaskSinks
from sinklens.sampling import PrefixCache


@pytest.mark.parametrize("name", ["mdlm", "sedd", "bd3lm-owt"])
def test_rows_do_not_depend_on_their_batch_and_copies_differ(conformance, name):
    model = open_folder(conformance / name).load()
    start = [[161, 3], [161, 4], [161, 3]]
    settings = {"gen_length": 9, "record_sinks": False, "seed": 3}
    settings |= {"first_hitting": False, "num_steps": 6} if name == "bd3lm-owt" else {"steps": 6}
    start = [[token % 150 for token in row] for row in start]
    batch = sinklens.generate(model, start, **settings)
    for row in (0, 1):
        alone = sinklens.generate(model, [start[row]], **settings)
        assert torch.equal(batch.canvas[row, -1], alone.canvas[0, -1])
    assert not torch.equal(batch.canvas[0, -1], batch.canvas[2, -1])


@pytest.mark.parametrize("name", ["mdlm", "sedd", "bd3lm-owt"])
def test_watching_a_run_changes_nothing_and_its_canvases_replay(conformance, name):
    model = open_folder(conformance / name).load()
    settings = {"gen_length": 8, "seed": 1}
    plain = sinklens.generate(model, [[5], [6]], record_sinks=False, **settings)
    watched = sinklens.generate(model, [[5], [6]], **settings)
    assert torch.equal(plain.canvas, watched.canvas)
    assert watched.sinks.data.sizes["step"] == plain.steps_run
    again = sinklens.generate(model, [[5], [6]], replay=plain, seed=9, record_sinks=False, gen_length=8)
    assert torch.equal(again.canvas, plain.canvas)
    with sinklens.trace(model, [[5], [6]], **settings) as t:
        sums = []
        for _ in t.steps:
            sums.append(t.blocks[0].attn.hook_pattern.output.sum(-1).mean().item())
    assert len(sums) == plain.steps_run
    assert sums == pytest.approx([1.0] * len(sums), abs=1e-5)


@pytest.mark.parametrize("name", ["mdlm", "sedd", "bd3lm-owt"])
def test_masked_sinks_are_exact(conformance, name):
    """Under MaskSinks, the first layer's pattern is the plain one without the strongest key of the step before."""
    model, at, seen = open_folder(conformance / name).load(), "blocks.0.attn.hook_pattern", {}

    def keep(value, hook):
        seen[hook.name, hook.step] = value.clone()

    hooks = [MaskSinks(top_k=1), (at, keep), ("hook_time", keep)]
    run = sinklens.generate(model, [[5]], gen_length=8, seed=1, hooks=hooks)
    assert run.steps_run > 4
    for step in range(1, run.steps_run):
        time = seen["hook_time", step]
        with torch.no_grad():
            _, plain = model.run_with_cache(run.canvas[:, step], time=time, names_filter=at)
        strongest = seen[at, step - 1].sum(2).argmax(-1)
        left = plain[at].scatter(-1, strongest[:, :, None, None].expand(-1, -1, plain[at].shape[2], 1), 0.0)
        expected = (left / left.sum(-1, keepdim=True)).nan_to_num(0.0)
        assert largest_difference(seen[at, step], expected) < 1e-5


def test_an_untimed_network_is_not_called_while_its_canvas_does_not_change(conformance):
    model = open_folder(conformance / "mdlm").load()
    calls = []
    handle = model.tree.hf.register_forward_pre_hook(lambda *_: calls.append(1))
    base = model.tree.hf.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        run = sinklens.generate(model, [[]], gen_length=4, steps=40, record_sinks=False)
    finally:
        handle.remove()
        base.remove()
    changes = int((run.canvas[0, 1:] != run.canvas[0, :-1]).any(dim=1).sum())
    assert run.steps_run > len(calls)
    assert len(calls) <= changes + 1


def test_bd3lm_refuses_what_it_cannot_run(conformance):
    model = open_folder(conformance / "bd3lm-owt").load()
    with pytest.raises(PromptError, match=r"need 28 positions; .* has 16"):
        sinklens.generate(model, [[161]], gen_length=27)
    with pytest.raises(PromptError, match="the prompts have 1 to 2 tokens; blocks are counted from the first column"):
        sinklens.generate(model, [[161], [161, 3]], gen_length=4)
    with pytest.raises(SettingError, match="num_steps 3 is less than block_length 4, and first_hitting decides one"):
        sinklens.generate(model, [[161]], gen_length=4, num_steps=3)
    with pytest.raises(PromptError, match="row 0 of the token ids is empty"):
        sinklens.generate(model, [[]], gen_length=4)


@pytest.mark.parametrize("name", ["mdlm", "sedd"])
def test_prompts_may_differ_in_length_and_be_empty(conformance, name):
    model, settings = open_folder(conformance / name).load(), {"gen_length": 7, "seed": 2, "record_sinks": False}
    batch = sinklens.generate(model, [[5, 6, 7], [], [9]], **settings)
    for row, prompt in ((1, []), (2, [9])):
        alone = sinklens.generate(model, [prompt], **settings)
        assert torch.equal(batch.canvas[row, -1, -7:], alone.canvas[0, -1, -7:])
    unprompted = sinklens.generate(model, torch.zeros(1, 0, dtype=torch.long), **settings)
    assert torch.equal(unprompted.canvas[0, -1], batch.canvas[1, -1, -7:])
    assert model.to_canvas([[]], gen_length=3).tolist() == [[model.mask_token_id] * 3]
    with pytest.raises(PromptError, match="row 0 of the token ids is empty; pass at least one token"):
        model([[]], time=0.5)
    with pytest.raises(PromptError, match=r"has no tokenizer.* or \[\[\]\] as the prompt, to generate without one"):
        sinklens.generate(model, "", gen_length=4)


def test_sinks_of_the_same_step_are_measured_at_the_steps_noise_level(conformance):
    """The separate pass that measures them reads the noise level that the step reads."""
    model, at, seen = open_folder(conformance / "sedd").load(), "blocks.0.attn.hook_pattern", {}
    keep = (lambda name: name in (at, "hook_time"), lambda value, hook: seen.update({(hook.name, hook.step): value}))
    run = sinklens.generate(model, [[5]], gen_length=8, hooks=[MaskSinks(top_k=1, same_step=True), keep], seed=1)
    for step in range(run.steps_run):
        with torch.no_grad():
            _, plain = model.run_with_cache(run.canvas[:, step], time=seen["hook_time", step], names_filter=at)
        strongest = plain[at].sum(2).argmax(-1)
        left = plain[at].scatter(-1, strongest[:, :, None, None].expand(-1, -1, plain[at].shape[2], 1), 0.0)
        assert largest_difference(seen[at, step], left / left.sum(-1, keepdim=True)) < 1e-5


def test_cache_policies_are_for_untimed_networks(conformance):
    settings = {"gen_length": 6, "cache": PrefixCache(), "record_sinks": False}
    with pytest.raises(
        SettingError, match=r"PrefixCache reuses keys of earlier steps, and those of .* change with the"
    ):
        sinklens.generate(open_folder(conformance / "sedd").load(), [[5]], **settings)
    model = open_folder(conformance / "mdlm").load()
    free = sinklens.generate(model, [[5, 7, 8]], **settings)
    watched = sinklens.generate(model, [[5, 7, 8]], **settings | {"record_sinks": True})
    assert torch.equal(free.canvas, watched.canvas)
    assert free.answers[0].masks == 0


def test_a_sampler_without_a_noise_level_is_refused_where_the_network_reads_it(conformance, tiny_llada):
    with pytest.raises(
        SettingError, match=r"the llada sampler does not set the noise level that .* reads; choose one of mdlm,"
    ):
        sinklens.generate(open_folder(conformance / "sedd").load(), [[5]], sampler="llada", gen_length=4)
    with pytest.raises(SettingError, match=r"the mdlm sampler sets a noise level, and .* does not read one"):
        sinklens.generate(tiny_llada, [[5]], sampler="mdlm", gen_length=4)
    run = sinklens.generate(
        open_folder(conformance / "mdlm").load(), [[5]], sampler="llada", gen_length=4, record_sinks=False
    )
    assert run.answers[0].masks == 0


# Rules, written from the published code


@pytest.fixture(scope="module")
def timed(conformance, tmp_path_factory):
    """Loads a checkpoint as a timed network, whether or not it was trained so."""
    load = loader(conformance, tmp_path_factory.mktemp)
    return cache(lambda name: load(f"{name} timed"))


def sigma_of(t):
    return -torch.log1p(-(1 - 1e-3) * t)


def race(weights, uniform):
    return (weights / (1e-10 - (uniform + 1e-10).log())).argmax(dim=-1)


def subs(logits, canvas, mask):
    logits = logits.clone()
    logits[:, :, mask] -= 1e6
    logits = logits - logits.logsumexp(dim=-1, keepdim=True)
    decided = canvas != mask
    logits[decided] = -1e6
    logits[decided, canvas[decided]] = 0
    return logits


def transition(score, canvas, mask, decrease):
    """SEDD's staggered score times its transition, at all positions."""
    size = score.shape[-1]
    extra = (1 - decrease.exp()) * score.sum(dim=-1)
    score = score * decrease.exp()
    score[..., mask] += extra
    edge = (-decrease).exp() * torch.nn.functional.one_hot(canvas, size)
    return score * (edge + (canvas == mask)[..., None] * (1 - (-decrease).exp()))


def log_score(model, canvas, time, mask):
    """SEDD's log score at all positions; MDLM's follows from SUBS."""
    sigma = sigma_of(time)
    logits = model(canvas, time=sigma[None])
    if model.family == "sedd":
        logits = logits - sigma.expm1().log() - torch.tensor(logits.shape[-1] - 1.0).log()
        return logits.scatter(-1, canvas[..., None], 0.0)
    log_k = -sigma.expm1().log()
    found = subs(logits, canvas, mask) + log_k
    found[..., mask] = 0
    present = torch.nn.functional.one_hot(canvas, logits.shape[-1]).bool()
    decided = torch.where(present, 0.0, -1e6)
    decided[..., mask] = -log_k
    return torch.where((canvas == mask)[..., None], found, decided)


def updated(model, canvas, mask, predictor, t, s, uniform):
    """One update of MDLM or SEDD, at all positions."""
    if predictor == "analytic":
        score = log_score(model, canvas, t, mask).exp()
        return race(transition(score, canvas, mask, sigma_of(t) - sigma_of(s)), uniform)
    if predictor == "euler":
        present = torch.nn.functional.one_hot(canvas, model.cfg.d_vocab).float()
        rates = (canvas == mask)[..., None].float() - present
        rates = rates * log_score(model, canvas, t, mask).exp()
        rates = rates.scatter(-1, canvas[..., None], 0.0)
        rates = rates.scatter(-1, canvas[..., None], -rates.sum(dim=-1, keepdim=True))
        return race(present + (t - s) * 0.999 / (1 - 0.999 * t) * rates, uniform)
    moves = [1 - (-sigma_of(time)).exp() for time in (t, s)] if predictor == "ddpm" else [t, s]
    weights = subs(model(canvas, time=sigma_of(t)[None]), canvas, mask).exp() * (moves[0] - moves[1])
    weights[..., mask] = moves[1]
    return torch.where(canvas == mask, race(weights, uniform), canvas)


def closed(model, canvas, mask, predictor, time, uniform):
    """The closing step."""
    if predictor in ("ddpm", "ddpm_cache"):
        return subs(model(canvas, time=sigma_of(time)[None]), canvas, mask).argmax(dim=-1)
    score = log_score(model, canvas, time, mask).exp()
    weights = transition(score, canvas, mask, sigma_of(time))
    weights[..., mask] = 0
    return torch.where(canvas == mask, race(weights, uniform), canvas)


@pytest.mark.parametrize(
    ("name", "predictor"),
    [("mdlm", "ddpm"), ("mdlm", "ddpm_cache"), ("mdlm", "analytic"), ("sedd", "euler"), ("sedd", "analytic")],
)
@pytest.mark.parametrize(("steps", "length", "closing"), [(5, 9, True), (11, 6, False), (3, 12, True)])
def test_timed_runs_with_prompts_follow_the_published_rule(timed, name, predictor, steps, length, closing):
    model = timed(name)
    mask, prompt = model.mask_token_id, torch.tensor([[7, 3], [20, 9], [1, 1]])
    canvas = torch.cat([prompt, torch.full((3, length), mask)], dim=1)
    uniform = torch.rand(steps + 1, *canvas.shape, model.cfg.d_vocab, generator=torch.Generator().manual_seed(steps))
    given = ("denoise.hook_uniform", lambda value, hook: uniform[hook.step])
    settings = {"predictor": predictor, "steps": steps, "noise_removal": closing, "gen_length": length}
    run = sinklens.generate(model, prompt, hooks=[given], record_sinks=False, **settings)
    times, length_of_step = torch.linspace(1, 1e-5, steps + 1), (1 - 1e-5) / steps
    for step in range(run.steps_run):
        with torch.no_grad():
            if step < steps:
                t = times[step]
                canvas = updated(model, canvas, mask, predictor, t, t - length_of_step, uniform[step])
            else:
                canvas = closed(model, canvas, mask, predictor, times[step], uniform[step])
        assert torch.equal(run.canvas[:, step + 1], canvas)
    assert run.steps_run == steps + closing or not bool((canvas == mask).any())


@pytest.mark.parametrize("nucleus_p", [1.0, 0.6])
@pytest.mark.parametrize("num_steps", [3, 6])
def test_timed_bd3lm_runs_follow_the_published_rule(timed, num_steps, nucleus_p):
    """A block's prediction, and with it its noise level, is used again until the block changes."""
    model, mask = timed("bd3lm-owt"), 162
    prompt, length, size = torch.tensor([[161, 4, 5, 9, 30]]), 9, 4
    uniform = torch.rand(
        5 * num_steps, 1, 14, model.cfg.d_vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(num_steps)
    )
    given = ("denoise.hook_uniform", lambda value, hook: uniform[hook.step])
    settings = {"first_hitting": False, "num_steps": num_steps, "nucleus_p": nucleus_p, "gen_length": length}
    run = sinklens.generate(model, prompt, hooks=[given], record_sinks=False, **settings)
    canvas, step = torch.cat([prompt, torch.full((1, length), mask)], dim=1), 0
    for start in range(0, 14, size):
        block, probs = slice(start, start + size), None
        for time in torch.linspace(1, 0, num_steps).tolist():
            masked = canvas[:, block] == mask
            if not bool(masked.any()):
                break
            if probs is None:
                sigma = min(-math.log(1 - time) if time < 1 else math.inf, 6.907755)
                with torch.no_grad():
                    logits = model(canvas[:, : start + size], time=sigma)[:, block]
                probs = subs(logits, canvas[:, block], mask).double().exp()
                ordered, order = probs.sort(dim=-1, descending=True)
                kept = ordered.cumsum(dim=-1) <= nucleus_p
                kept[..., 0] = True
                probs = torch.zeros_like(probs).scatter(-1, order, ordered * kept)
                probs = probs / probs.sum(dim=-1, keepdim=True)
            stays = (time - 1 / num_steps) / time if time > 0 else 0.0
            weights = probs * (1 - stays)
            weights[..., mask] = stays
            drawn = torch.where(masked, race(weights, uniform[step][:, block]), canvas[:, block])
            if not torch.equal(drawn, canvas[:, block]):
                probs = None
            canvas = torch.cat([canvas[:, :start], drawn, canvas[:, start + size :]], dim=1)
            step += 1
            assert torch.equal(run.canvas[:, step], canvas)
    assert run.steps_run == step
    assert run.answers[0].masks == 0


def test_first_hitting_decides_one_position_at_falling_times(timed):
    """The time falls by u^(1/m), whose mean is m / (m + 1), and each of m positions is as likely as the others."""
    model, times = timed("bd3lm-owt"), []
    rows = [[161, number % 150, 3, 4] for number in range(240)]
    keep = ("hook_time", lambda value, hook: times.append(1 - (-value).exp()) or None)
    run = sinklens.generate(model, rows, gen_length=4, hooks=[keep], record_sinks=False)
    assert run.steps_run == 4
    assert bool(((run.canvas == 162).sum(dim=2) == torch.arange(4, -1, -1)).all())
    before = torch.ones(240)
    for time, masks in zip(times, (4, 3, 2, 1), strict=True):
        assert bool((time <= before + 1e-6).all())
        assert float((time / before).mean()) == pytest.approx(masks / (masks + 1), abs=0.06)
        before = time
    first = (run.canvas[:, 1, 4:] != 162).sum(dim=0)
    assert bool(((first - 60).abs() < 27).all())  # four standard deviations of a fair choice
