"""The stored runs of Nemotron-Labs-Diffusion, and of DiffuLLaMA and DiffuGPT, as runs of sinklens.

Nemotron-Labs-Diffusion decodes in several modes. The reference kept the canvases of the passes that fill a block; those
of its causal passes follow from them. DiffuLLaMA draws with uniform numbers, which the data keep as integers: k stands
for (k + 0.5) / 65536. They go to ``denoise.hook_uniform``, and tokens that are given after a gap to the first canvas.

Limitation: a run of sinklens ends when nothing is undecided, and DiffuLLaMA's reference goes on. Only the passes before
are compared.
"""

from collections.abc import Iterator
from typing import Any

import torch
from stored.folders import ReferenceFolder, StoredRun
from torch import Tensor

FILLING = ("denoise", "draft")
"""The modes of the passes that the reference kept."""
_MODES = {"ar_generate": "autoregressive", "generate": "diffusion", "linear_spec_generate": "speculation"}


def nemotron(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Runs of all modes; one in which a row ends a block of another row, a defect, is not repeated."""
    if "DEFECT" in given.get("note", ""):
        return
    stored, name = folder.tensors, f"gen{number}"
    prompt, result = stored[f"{name}.prompt"], stored[f"{name}.result"]
    nothing = torch.zeros(len(prompt), 0, result.shape[1], dtype=torch.long)
    changes = {"eos_token_id": given["eos_token_id"]} if "eos_token_id" in given else {}
    canvas = stored.get(f"{name}.canvas", nothing)
    yield StoredRun(number, prompt, _settings(given), canvas, result, changes=changes, modes=FILLING)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    method = given["method"]
    found: dict[str, Any] = {"gen_length": given.get("max_new_tokens") or given["gen_length"]}
    found |= {"mode": _MODES[method]} if method in _MODES else {"sampler": "nemotron-dllm"}
    if method == "ar_generate":
        return found
    found["block_length"] = given["block_length"]
    if method == "generate":
        return found | {"threshold": given.get("threshold"), "causal_context": given.get("causal_context", True)}
    if method == "linear_spec_generate":
        return found | {"draft_threshold": given.get("threshold", 0.0), "use_adapter": given.get("lora", False)}
    blocks = given["gen_length"] // given["block_length"]
    return found | {"denoising_steps": given["steps"] // blocks, "neg_entropy": given["neg_entropy"]}


class _Row:
    """One row of a stored run of DiffuLLaMA: the hooks that give a run its tokens and random numbers."""

    def __init__(self, folder: ReferenceFolder, number: int, row: int) -> None:
        stored, name = folder.tensors, f"gen{number}"
        self.ids, self.given = stored[f"{name}.input_ids"][row].long(), stored[f"{name}.src_mask"][row].bool()
        self.prefix = int((~self.given).long().argmax())
        passes = stored[f"{name}.canvas"].shape[1]
        self._numbers = torch.zeros(passes, len(self.ids), 2, dtype=torch.float64)
        for place, key in enumerate(("draws", "keep_draws")):
            if f"{name}.{key}" in stored:
                drawn = (stored[f"{name}.{key}"][row].double() + 0.5) / 65536
                self._numbers[: len(drawn), :, place] = drawn
        self._numbers[:, 1:, 0] = self._numbers[:, :-1, 0].clone()  # the draw at i proposes the token of i + 1

    @property
    def hooks(self) -> list[Any]:
        """The hooks of a run."""
        return [
            ("denoise.hook_canvas", self._fill),
            ("denoise.hook_uniform", self._uniform),
            ("denoise.hook_candidates", self._propose_first),
        ]

    def _fill(self, value: Tensor, hook: Any) -> Tensor:
        """At the first canvas: the tokens that are given after a gap."""
        if hook.step == 0:
            value[0, self.given] = self.ids[self.given].to(value.device)
        return value

    def _uniform(self, value: Tensor, hook: Any) -> Tensor:
        return self._numbers[hook.step][None].to(value.device)

    def _propose_first(self, value: Tensor, hook: Any) -> Tensor:
        """Nothing predicts position 0; the reference proposes the first id of its input."""
        if not self.prefix:
            value[:, 0] = self.ids[0]
        return value


def diffullama(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Runs of both of the authors' samplers, row by row."""
    settings = {"steps": given["diffusion_steps"], "temperature": given["logits_temp"]}
    if given["sampler"] == "model.py":
        settings |= {"top_p": given["topp_temp"]}
    else:
        settings |= {"order": "confidence", "top_p": 1.0, "greedy": given["greedy"]}
    stored, mask = folder.tensors, folder.facts["mask_token_id"]
    canvases = stored[f"gen{number}.canvas"].long()
    result = torch.nn.functional.pad(stored[f"gen{number}.result"].long(), (1, 0), value=-1)
    for row in range(given["batch"]):
        one = _Row(folder, number, row)
        masked = (canvases[row] == mask).any(dim=1)
        more = {"gen_length": len(one.ids) - one.prefix, "hooks": one.hooks}
        prompt = [one.ids[: one.prefix].tolist()]
        yield StoredRun(number, prompt, settings | more, canvases[:, masked], result, slice(row, row + 1))
