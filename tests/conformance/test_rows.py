"""Runs of every kind of sampler: a row does not depend on its batch, watching changes nothing, and runs replay.

A row of a batch may wait for the others, so its canvases are compared without repetitions.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stored.folders import largest_difference
from stored.runs import open_folder
from torch import Tensor

import sinklens
from sinklens.interventions import ForceTokens, MaskSinks


class Case(NamedTuple):
    """How a sampler is run: the folder, what `ReferenceFolder.load` gets, and the arguments of `generate`."""

    folder: str
    settings: dict[str, Any]
    prompts: Sequence[list[int]] = ([5, 9, 13], [8, 2, 4, 6, 7])
    load: Mapping[str, Any] = MappingProxyType({})
    drawn: bool = True

    def generate(
        self, conformance: Any, prompts: Sequence[list[int]] | None = None, **more: Any
    ) -> sinklens.Generation:
        """A run of the rows, or of other prompts."""
        model = open_folder(conformance / self.folder).load(**self.load)
        return sinklens.generate(model, [*(prompts or self.prompts)], **{"seed": 3} | self.settings | more)


CORRECTION = {"sampler": "gidd-self-correction", "temperature": 3.0, "start_canvas": [3, 40, 77, 12, 99, 54]}
WINDOWS = {"sampler": "mdlm-windows", "window_length": 9, "stride_length": 4, "window_steps": 5}
STARTED = [[161, 3], [11, 4]]
LONG = [[5, 9, 13, 7, 21, 33, 2, 8, 40, 17, 90, 31, 4], [6, 7, 8, 9, 41, 52, 60, 11, 12, 13, 71]]
BLOCKS_OF_8 = {"block_length": 8, "changes": {"eos_token_id": 305}}
ENDING = {"changes": {"eos_token_id": 91}}
CASES = {
    "duo": Case("duo", {"gen_length": 6, "steps": 5}),
    "duo psi": Case("duo", {"gen_length": 6, "steps": 5, "low_mode": "constant-0.5", "top_p": 0.9}),
    "gidd": Case("gidd", {"gen_length": 6, "steps": 6}),
    "gidd correction": Case("gidd", {"gen_length": 6, "steps": 4, **CORRECTION}),
    "remdm": Case("mdlm", {"gen_length": 6, "sampler": "remdm", "steps": 6, "low_mode": "max-capped-0.4"}),
    "mdlm": Case("mdlm", {"gen_length": 7, "steps": 6}, [[5, 6, 7], [], [9]]),
    "mdlm windows": Case("mdlm", {"gen_length": 14, **WINDOWS}, [[5, 6, 7], [8]]),
    "sedd": Case("sedd", {"gen_length": 7, "steps": 6}, [[5, 6, 7], [], [9]]),
    "bd3lm-owt": Case("bd3lm-owt", {"gen_length": 9}, STARTED),
    "bd3lm-owt by time": Case("bd3lm-owt", {"gen_length": 9, "first_hitting": False, "num_steps": 6}, STARTED),
    "diffugpt": Case("diffugpt", {"gen_length": 8, "steps": 5}, [[5, 6, 7], [9]]),
    "diffugpt by confidence": Case("diffugpt", {"gen_length": 8, "steps": 5, "order": "confidence"}, [[5, 6, 7], [9]]),
    "bd3lm card": Case(
        "bd3lm", {"sampler": "bd3lm-card", "gen_length": 21, "denoising_steps": 3}, LONG, BLOCKS_OF_8, False
    ),
    "bd3lm card, guided": Case(
        "bd3lm", {"sampler": "bd3lm-card", "gen_length": 21, "denoising_steps": 3, "cfg_scale": 1.5}, LONG, BLOCKS_OF_8,
        False,
    ),
    "fast-dllm-v2": Case("fast-dllm-v2", {"gen_length": 20, "threshold": 0.4}, LONG, BLOCKS_OF_8, False),
    "fast-dllm-v2 sub-blocks": Case(
        "fast-dllm-v2", {"gen_length": 20, "small_block_size": 4, "threshold": 0.4, "use_block_cache": True}, LONG,
        BLOCKS_OF_8, False,
    ),
    "sdar": Case("sdar", {"gen_length": 8, "stop": False}, LONG, {"block_length": 4}, False),
    "llada2": Case(
        "llada2-moe", {"sampler": "llada2.1", "gen_length": 8, "stop": False, "max_post_steps": 1}, LONG,
        {"block_length": 8}, False,
    ),
    "bd3lm": Case("bd3lm", {"gen_length": 8, "stop": False}, LONG, {"block_length": 4}, False),
    "diffusion-gemma": Case(
        "diffusion-gemma", {"gen_length": 8, "max_denoising_steps": 4, "entropy_bound": 1.5, "pad_token_id": 0},
        drawn=False,
    ),
    "llada-moe": Case("llada-moe", {"gen_length": 8, "block_length": 8}, drawn=False),
    "rnd1": Case("rnd1", {"gen_length": 8, "steps": 5}, drawn=False),
    "open-dcoder": Case("open-dcoder", {"gen_length": 8, "alg": "p2", "steps": 5}, drawn=False),
    "nemotron": Case("nemotron-diffusion", {"mode": "diffusion", "gen_length": 16}, LONG, ENDING, False),
    "nemotron cached": Case(
        "nemotron-diffusion", {"mode": "diffusion", "gen_length": 16, "threshold": 0.7, "use_cache": True}, LONG,
        ENDING, False,
    ),
}  # fmt: skip


def changes(canvas: Tensor) -> Tensor:
    return torch.unique_consecutive(canvas, dim=0)


@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_their_batch_and_copies_differ(conformance, name):
    case = CASES[name]
    both = case.generate(conformance)
    for row, prompt in enumerate(case.prompts):
        alone = case.generate(conformance, [prompt])
        start, length = both.prompt_length - alone.prompt_length, alone.canvas.shape[2]
        assert torch.equal(changes(both.canvas[row, :, start : start + length]), changes(alone.canvas[0]))
        assert (
            both.canvas[row, :, both.prompt_length - len(prompt) : both.prompt_length] == torch.tensor(prompt)
        ).all()
        if name.startswith("bd3lm card"):
            ours, theirs = (run.sinks.scores().fillna(0).to_numpy() for run in (both, alone))
            np.testing.assert_allclose(
                ours[row, : alone.steps_run, ..., start : start + length], theirs[0], rtol=0, atol=1e-4
            )
    if case.drawn:
        copies = case.generate(conformance, [case.prompts[0]] * 2)
        assert torch.equal(changes(copies.canvas[0]), changes(case.generate(conformance, case.prompts[:1]).canvas[0]))
        assert not torch.equal(copies.canvas[0], copies.canvas[1])


@pytest.mark.parametrize("name", CASES)
def test_watching_changes_nothing_and_a_run_replays(conformance, name):
    case = CASES[name]
    rows = case.prompts[:1]
    plain, watched = (case.generate(conformance, rows, record_sinks=record) for record in (False, True))
    assert torch.equal(plain.canvas, watched.canvas)
    again = case.generate(conformance, rows, replay=plain, seed=9)
    assert torch.equal(again.canvas, plain.canvas)
    np.testing.assert_allclose(again.sinks["score"], watched.sinks["score"], atol=1e-5)
    if name.startswith("duo"):
        assert watched.undecided[:, :-1, watched.prompt_length :].all()
        assert not watched.undecided[:, -1].any()
    elif case.drawn and case.folder != "diffugpt":  # where a drawn mask token is a decision
        assert torch.equal(watched.undecided, watched.canvas == watched.model.mask_token_id)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["duo", "gidd correction", "remdm", "sedd"])
def test_a_pass_over_a_step_reads_its_noise_level(conformance, name):
    case, shown = CASES[name], []
    watched = ("blocks.1.attn.hook_pattern", lambda value, hook: shown.append(value[0, 0].clone()))
    run = case.generate(conformance, case.prompts[:1], hooks=[watched])
    for step in (0, run.steps_run - 1):
        found = sinklens.views.pattern_at(case.generate(conformance, case.prompts[:1], replay=run), step, 1)
        torch.testing.assert_close(found[0], shown[step].float(), atol=1e-5, rtol=1e-4)
    forced = case.generate(
        conformance, case.prompts[:1], hooks=[ForceTokens(tokens={-1: 11}, steps=[run.steps_run - 1])]
    )
    assert (forced.canvas[:, run.steps_run - 1, -1] == 11).all()


@pytest.mark.parametrize(
    ("name", "same_step"),
    [("diffullama", False), ("mdlm", False), ("sedd", False), ("bd3lm-owt", False), ("sedd", True), ("duo", True)],
)
def test_masked_sinks_are_exact(conformance, name, same_step):
    """The first layer's pattern is the plain one without the strongest key of the step, or of the step before.

    The separate pass that measures sinks of the same step reads the noise level that the step reads.
    """
    model, at = open_folder(conformance / name).load(), "blocks.0.attn.hook_pattern"
    seen: dict[tuple[str, int], Tensor] = {}
    keep = (lambda point: point in (at, "hook_time"), lambda v, hook: seen.update({(hook.name, hook.step): v.clone()}))
    hooks = [MaskSinks(top_k=1, same_step=same_step), keep]
    run = sinklens.generate(model, [[5]], gen_length=8, steps=None if name == "bd3lm-owt" else 8, seed=1, hooks=hooks)
    assert run.steps_run > 3
    for step in range(not same_step, run.steps_run):
        time = {"time": seen["hook_time", step]} if ("hook_time", step) in seen else {}
        with torch.no_grad():
            _, plain = model.run_with_cache(run.canvas[:, step], names_filter=at, **time)
        strongest = (plain[at] if same_step else seen[at, step - 1]).sum(2).argmax(-1)
        left = plain[at].scatter(-1, strongest[:, :, None, None].expand(-1, -1, plain[at].shape[2], 1), 0.0)
        assert largest_difference(seen[at, step], (left / left.sum(-1, keepdim=True)).nan_to_num(0.0)) < 1e-5


@pytest.mark.parametrize(
    ("name", "size", "mask", "settings"),
    [
        ("sdar", 4, 309, {"gen_length": 14, "stop": False}),
        ("fast-dllm-v2", None, 309, {"gen_length": 20}),
        ("llada2-moe", 8, 315, {"gen_length": 20, "sampler": "llada2.1"}),
    ],
)
def test_a_proposed_mask_token_stays_masked_and_the_run_ends(conformance, name, size, mask, settings):
    """The references raise IndexError, or never end."""
    reference = open_folder(conformance / name)
    prompt = reference.tensors["gen0.prompt"]
    place = prompt.shape[1] + 3
    propose = ("denoise.hook_candidates", lambda ids, hook: torch.where(torch.arange(ids.shape[1]) == place, mask, ids))
    run = sinklens.generate(reference.load(block_length=size), prompt, hooks=[propose], record_sinks=False, **settings)
    assert run.steps_run <= run.settings.steps
    assert run.tokens[0, place] == mask
    if name == "sdar":
        assert (run.tokens[0] == mask).nonzero()[:, 0].tolist() == [place]
        assert run.answers[0].masks == 1


def test_the_lab_keeps_the_noise_levels(conformance):
    from sinklens.live.outcome import ARRAYS, RunOutcome

    case = CASES["gidd correction"]
    run = case.generate(conformance, case.prompts[:1])
    kept = RunOutcome.of(run)
    arrays = {name: getattr(kept, name) for name in ARRAYS}
    again = RunOutcome.from_record(kept.record(), arrays).generation(run.model, None)
    assert torch.equal(again.time, run.time)
    assert again.settings == run.settings
