"""Several threads on one model, and results in other processes: each finds what it would find alone."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError

PROMPTS = ("Question: 2 + 3?\nAnswer:", "Question: I have 4 apples and eat 2. How many are left?\nAnswer:")
POINT = "blocks.1.hook_resid_post"


def a_run(model, prompt):
    return sinklens.generate(model, prompt, gen_length=8).sinks.data["score"].values


def a_block(model, prompt):
    with sinklens.trace(model, prompt, gen_length=8) as t:
        for _ in t.steps:
            t[POINT][:, 0] = 0
    return t.sinks.data["score"].values


def a_hooked_pass(model, prompt):
    found = []
    with model.hooks(fwd_hooks=[(POINT, lambda value, hook: found.append(value.clone()))]):
        model(model.to_canvas(prompt, gen_length=8))
    assert len(found) == 1, "the hook of this thread was called for the pass of another"
    return found[0].detach().numpy()


def a_cached_pass(model, prompt):
    _, cache = model.run_with_cache(model.to_canvas(prompt, gen_length=8))
    return cache[POINT].detach().numpy()


def a_plain_trace(model, prompt):
    with model.trace(model.to_canvas(prompt, gen_length=8)):
        value = model.blocks[1].hook_resid_post.output.save()
    return value.detach().numpy()


def a_likelihood(model, prompt):
    hooks = [(POINT, lambda value, hook: value * 0.5)]
    return np.array(model.likelihood(prompt, " 5", mc_num=4, draws_per_start=4, hooks=hooks).value)


@pytest.mark.parametrize("work", [a_run, a_block, a_hooked_pass, a_cached_pass, a_plain_trace, a_likelihood])
def test_threads_find_what_each_would_find_alone(tiny_llada, work):
    alone = [work(tiny_llada, prompt) for prompt in PROMPTS]
    others = [one for one in (a_run, a_block, a_hooked_pass) if one is not work]
    jobs = [(one, number) for one in (work, *others) for number in (0, 1)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: job[0](tiny_llada, PROMPTS[job[1]]), jobs))
    for (one, number), value in zip(jobs, found, strict=True):
        if one is work:
            np.testing.assert_array_equal(value, alone[number])


def test_a_run_waits_for_a_block_of_hooks_in_another_thread(tiny_llada):
    entered, leave, calls = Event(), Event(), []

    def hold():
        with tiny_llada.hooks(fwd_hooks=[(POINT, lambda value, hook: calls.append(hook.step))]):
            entered.set()
            leave.wait(30)

    holder = Thread(target=hold)
    holder.start()
    entered.wait(30)
    runner = Thread(target=a_run, args=(tiny_llada, PROMPTS[0]))
    runner.start()
    runner.join(0.5)
    assert runner.is_alive()
    leave.set()
    runner.join(30)
    holder.join(30)
    assert not runner.is_alive()
    assert calls == []


@pytest.mark.parametrize("copied", [lambda run: pickle.loads(pickle.dumps(run)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_copied_run_leaves_its_model_behind(tiny_llada, copied):
    run = sinklens.generate(tiny_llada, PROMPTS[0], gen_length=8)
    again = copied(run)
    assert again.text == run.text
    assert torch.equal(again.canvas, run.canvas)
    np.testing.assert_array_equal(again.sinks.data["score"], run.sinks.data["score"])
    with pytest.raises(SettingError, match=r"replace\(run, model=model\)"):
        again.model.tree  # noqa: B018
    assert copy.copy(run).model is tiny_llada
    assert torch.equal(sinklens.generate(tiny_llada, PROMPTS[0], replay=again, gen_length=8).canvas, run.canvas)
    assert replace(again, model=tiny_llada).model is tiny_llada


def test_a_pickled_cache_still_knows_every_spelling(tiny_llada):
    _, cache = tiny_llada.run_with_cache(tiny_llada.to_canvas(PROMPTS[0], gen_length=8))
    again = pickle.loads(pickle.dumps(cache))
    for spelling in ("blocks.-1.hook_resid_post", ("resid_post", 3), "blocks.3.hook_out"):
        assert torch.equal(again[spelling], cache[spelling])
    with pytest.raises(SettingError, match=r"cache\.model = model\.tree"):
        again.accumulated_resid()


@pytest.mark.parametrize("watched", [False, True], ids=["fused", "map"])
def test_a_run_under_autocast_has_the_canvas_of_an_unwatched_one(tiny_llada, watched):
    hooks = [("blocks.0.attn.hook_pattern", lambda value, hook: None)] if watched else []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = sinklens.generate(tiny_llada, PROMPTS[0], gen_length=8, hooks=hooks)
        plain = sinklens.generate(tiny_llada, PROMPTS[0], gen_length=8, record_sinks=False)
    if not watched:  # the map rounds otherwise
        assert torch.equal(run.canvas, plain.canvas)
    np.testing.assert_allclose(run.sinks.data["score"].sum("pos"), 8 + run.prompt_length, rtol=0.02)
