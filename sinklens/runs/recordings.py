"""Runs made elsewhere: their canvases, opened here under all hook points.

A fast engine, or another library, can keep which tokens were on the canvas at every step. `replay` runs a model over
these canvases, so everything that sinklens reads or changes in a run of its own is there too. `from_history` takes the
lists of canvases that Dream's ``diffusion_generate(output_history=True, return_dict_in_generate=True)`` and dLLM's
samplers (``return_dict=True``) return.

Pitfall: the canvases alone do not say how an engine computed its steps. With approximate caches, quantization or
another attention kernel its activations differed from those of a replay, which are those of the exact model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import sampler_name
from sinklens.model import load
from sinklens.runs.request import Hooks, RunRequest
from sinklens.runs.result import Generation
from sinklens.runs.session import generate
from sinklens.runs.start import start
from sinklens.sampling.state import State


@dataclass(frozen=True, eq=False)
class RecordedCanvases:
    """The canvases of one run of one prompt.

    Attributes:
        prompt_ids: the prompt, without padding.
        canvas: the ids that entered each step, and those after the last.
        undecided: which of them are undecided.
    """

    prompt_ids: list[int]
    canvas: Int[Tensor, "step pos"]
    undecided: Bool[Tensor, "step pos"]


def from_history(
    history: Sequence[Int[Tensor, "batch pos"]],
    prompts: Sequence[Sequence[int]],
    mask_id: int,
    *,
    padding_side: Literal["left", "right"] = "left",
) -> list[RecordedCanvases]:
    """Recorded runs from the canvases of a batch, one tensor per step.

    ``output.history`` of Dream's ``diffusion_generate`` holds the canvas after each step and pads prompts on the left;
    ``output.histories`` of dLLM's samplers also holds the first canvas and pads on the right. A first canvas without
    any decided position is taken as the start, otherwise one is put before it.

    Args:
        history: the canvases.
        prompts: token ids of each row's prompt, without padding.
        mask_id: the mask token; -1 in the canvases of an autoregressive run.
        padding_side: where shorter rows are padded.

    Raises:
        SettingError: no canvases, or a row does not hold its prompt.
    """
    if not history or len(history[0]) != len(prompts):
        raise SettingError(
            f"history must hold canvases [batch, pos] of {len(prompts)} prompts; got {len(history)} canvases"
            f"{f' of {len(history[0])} rows' if history else ''}."
        )
    canvases = torch.stack([canvas.detach().cpu().long() for canvas in history], dim=1)
    longest = max(len(prompt) for prompt in prompts)
    generated, found = canvases.shape[2] - longest, []
    for row, prompt in zip(canvases, prompts, strict=True):
        begin = longest - len(prompt) if padding_side == "left" else 0
        canvas = row[:, begin : begin + len(prompt) + generated]
        if bool((canvas[0, len(prompt) :] != mask_id).any()):
            first = canvas[:1].clone()
            first[:, len(prompt) :] = mask_id
            canvas = torch.cat([first, canvas])
        if generated < 1 or len(canvas) < 2 or canvas[0, : len(prompt)].tolist() != list(prompt):
            raise SettingError("every canvas must begin with its prompt, and decide positions after it.")
        found.append(RecordedCanvases([int(token) for token in prompt], canvas, canvas == mask_id))
    return found


@dataclass(frozen=True, eq=False)
class _Placed:
    """Canvases in the columns of a run, as ``replay=`` takes them."""

    canvas: Int[Tensor, "1 step pos"]
    undecided: Bool[Tensor, "1 step pos"]


def replay(
    model: Any,
    recorded: RecordedCanvases,
    *,
    hooks: Hooks = (),
    record_sinks: Any = True,
    progress: bool | None = None,
    **settings: Any,
) -> Generation:
    """Run a model over the canvases of a recorded run; all points, hooks and interventions are those of `generate`.

    Args:
        model: a `Model`, or anything `sinklens.load` accepts.
        recorded: one run, from `from_history`.
        hooks, record_sinks, progress: as in `sinklens.generate`.
        **settings: settings of the sampler. By default the family's sampler runs with as many steps as the recorded
            run, in one block.

    Raises:
        SettingError: the sampler cannot run over these canvases; the message says why.
        PromptError: token ids that the model does not have.
    """
    model = load(model)
    names = find_sampler(sampler_name(model.family_record, settings)).setting_names()
    length = recorded.canvas.shape[1] - len(recorded.prompt_ids)
    shape = {"gen_length": length, "steps": len(recorded.canvas) - 1, "block_length": model.block_length or length}
    given: Mapping[str, Any] = {name: value for name, value in shape.items() if name in names} | settings
    shared = {"record_sinks": record_sinks, "progress": progress, "hooks": hooks}
    request = RunRequest([recorded.prompt_ids], **shared, settings=given)
    placed = _placed(start(model, request)[1], recorded)
    return generate(model, [recorded.prompt_ids], replay=placed, **shared, **given)


def _placed(state: State, recorded: RecordedCanvases) -> _Placed:
    """The recorded canvases in the columns of a run, which may have padding for its blocks."""
    real, size, prompt = state.real[0].cpu(), recorded.canvas.shape[1], len(recorded.prompt_ids)
    if int(real.sum()) != size:
        raise SettingError(
            f"the recorded run has {size} positions, {size - prompt} of them after the prompt, and this run "
            f"{int(real.sum())}; pass gen_length={size - prompt}, or a sampler whose canvas has this length."
        )
    canvas = state.canvas[:1].cpu().repeat(len(recorded.canvas), 1)
    undecided = torch.zeros_like(canvas, dtype=torch.bool)
    canvas[:, real] = recorded.canvas.masked_fill(recorded.undecided, state.mask_id)
    undecided[:, real] = recorded.undecided
    return _Placed(canvas[None], undecided[None])
