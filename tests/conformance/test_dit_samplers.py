"""The samplers of MDLM, SEDD and BD3-LM write every canvas of the authors' runs, given their random numbers."""

import json
from functools import cache

import pytest
import torch
from published import largest_difference
from safetensors.torch import load_file

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.interventions import MaskSinks, Suffix

RUNS = [(name, number) for name, count in (("mdlm", 4), ("sedd", 5), ("bd3lm-owt", 6)) for number in range(count)]
REFUSED = [("bd3lm-owt", 3)]
OF_OTHERS = {"mdlm": ["gen4", "gen5", "gen6", "gen7"]}
"""Runs with a moving window, and those of another repository's sampler."""


@cache
def _model(folder):
    return sinklens.load(folder, family="sedd" if folder.name == "sedd" else None)


@cache
def _stored(folder):
    runs = json.loads((folder / "expected.json").read_text())["generate"]
    return load_file(folder / "expected.safetensors"), {run["run"]: run for run in runs}


class Draws:
    """Puts the stored random numbers at ``denoise.hook_uniform``; those of bd3lm-owt are of the block."""

    def __init__(self, stored, run, blocks=None):
        self.steps, self.blocks = (stored[f"{run}.draws"].double() + 0.5) / 65536, blocks
        if f"{run}.draws_denoise" in stored:
            closing = (stored[f"{run}.draws_denoise"].double() + 0.5) / 65536
            self.steps = [*self.steps, torch.nn.functional.pad(closing, (0, 1))]

    def __call__(self, value, hook):
        if self.blocks is None:
            return self.steps[hook.step].to(value.dtype)
        size = self.steps.shape[2]
        value[:, self.blocks[hook.step] * size :][:, :size] = self.steps[hook.step]
        return value


def repeated(folder, number, **more):
    """A stored run, repeated with its draws."""
    stored, runs = _stored(folder)
    run = runs[f"gen{number}"]
    hooks, settings = [], {}
    prompt, length = [[] for _ in range(run["batch"])], run["length"]
    if folder.name == "bd3lm-owt":
        prompt, length = [[161]], run["length"] - 1
        settings = {key: run[key] for key in ("first_hitting", "num_steps", "nucleus_p")}
        changed = stored[f"{run['run']}.canvas"] != stored[f"{run['run']}.entering"]
        existing = (stored[f"{run['run']}.entering"] >= 0).sum(dim=2)[:, 0]
        hooks.append(("denoise.hook_uniform", Draws(stored, run["run"], (existing // 4 - 1).tolist())))
        if run["first_hitting"]:

            def chosen(value, hook):
                written = torch.zeros_like(value)
                written[:, : changed.shape[2]] = changed[hook.step]
                assert bool(value.sum() == 1)
                return written

            hooks.append(("denoise.hook_commit", chosen))
    else:
        settings = {"predictor": run["sampler"], "steps": run["steps"]}
        settings["noise_removal"] = run["noise_removal"] if "noise_removal" in run else run["denoise"]
        hooks.append(("denoise.hook_uniform", Draws(stored, run["run"])))
        if "fixed_positions" in run:
            before = sum(place == index for index, place in enumerate(run["fixed_positions"]))
            tokens = run["fixed_tokens"]
            prompt, length = [tokens[:before]], length - len(tokens)
            hooks += [Suffix(text=tokens[before:])] if tokens[before:] else []
    hooks += more.pop("hooks", [])
    return sinklens.generate(_model(folder), prompt, gen_length=length, hooks=hooks, **settings, **more)


def test_every_run_of_the_references_is_compared(conformance):
    for name in ("mdlm", "sedd", "bd3lm-owt"):
        _, runs = _stored(conformance / name)
        compared = [f"gen{number}" for folder, number in RUNS if folder == name]
        assert [*compared, *OF_OTHERS.get(name, [])] == list(runs)


@pytest.mark.parametrize(("name", "number"), [run for run in RUNS if run not in REFUSED])
def test_every_canvas_equals_the_references(conformance, name, number):
    folder = conformance / name
    stored, runs = _stored(folder)
    run, canvas = repeated(folder, number, record_sinks=False), stored[f"gen{number}.canvas"]
    expected = torch.cat([canvas, stored[f"gen{number}.result"][None]]).transpose(0, 1)  # [batch, step + 1, pos]
    found = run.canvas[:, 1:]
    if runs[f"gen{number}"].get("token_0_written_at_t_0"):  # the reference's defect: all weights are infinite
        wrong = (expected[:, -1] == 0).nonzero()[:, 1]
        assert len(wrong) == 1
        assert bool((found[:, -1, wrong] != 0).all())
        found[:, -1, wrong] = 0
    exists = expected >= 0
    steps = found.shape[1]
    assert torch.equal(found[exists[:, :steps]], expected[:, :steps][exists[:, :steps]].long())
    assert torch.equal(expected[:, steps - 1 :], expected[:, -1:].expand(-1, expected.shape[1] - steps + 1, -1))
    assert run.answers[0].masks == 0


@pytest.mark.parametrize("name", ["mdlm", "sedd", "bd3lm-owt"])
def test_rows_do_not_depend_on_their_batch_and_copies_differ(conformance, name):
    model = _model(conformance / name)
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
    model = _model(conformance / name)
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
    model, at, seen = _model(conformance / name), "blocks.0.attn.hook_pattern", {}

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
    model = _model(conformance / "mdlm")
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
    model = _model(conformance / "bd3lm-owt")
    with pytest.raises(PromptError, match=r"need 28 positions; .* has 16"):
        sinklens.generate(model, [[161]], gen_length=27)
    with pytest.raises(PromptError, match="the prompts have 1 to 2 tokens; blocks are counted from the first column"):
        sinklens.generate(model, [[161], [161, 3]], gen_length=4)
    with pytest.raises(SettingError, match="num_steps 3 is less than block_length 4, and first_hitting decides one"):
        sinklens.generate(model, [[161]], gen_length=4, num_steps=3)
    with pytest.raises(PromptError, match="row 0 of the token ids is empty"):
        sinklens.generate(model, [[]], gen_length=4)


def test_a_sampler_without_a_noise_level_is_refused_where_the_network_reads_it(conformance, tiny_llada):
    with pytest.raises(SettingError, match="reads the noise level of its canvas, which the llada sampler does not set"):
        sinklens.generate(_model(conformance / "sedd"), [[5]], sampler="llada", gen_length=4)
    with pytest.raises(SettingError, match=r"the mdlm sampler sets a noise level, and .* does not read one"):
        sinklens.generate(tiny_llada, [[5]], sampler="mdlm", gen_length=4)
    run = sinklens.generate(_model(conformance / "mdlm"), [[5]], sampler="llada", gen_length=4, record_sinks=False)
    assert run.answers[0].masks == 0
