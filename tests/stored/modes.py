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
from jaxtyping import Bool, Int
from stored.draws import given_draws
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


def diffullama(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Runs of both of the authors' samplers, row by row."""
    settings = {"steps": given["diffusion_steps"], "temperature": given["logits_temp"]}
    if given["sampler"] == "model.py":
        settings |= {"top_p": given["topp_temp"]}
    else:
        settings |= {"order": "confidence", "top_p": 1.0, "greedy": given["greedy"]}
    stored, name = folder.tensors, f"gen{number}"
    canvases = stored[f"{name}.canvas"].long()
    result = torch.nn.functional.pad(stored[f"{name}.result"].long(), (1, 0), value=-1)
    for row in range(given["batch"]):
        ids, fixed = stored[f"{name}.input_ids"][row].long(), stored[f"{name}.src_mask"][row].bool()
        prefix, masked = int((~fixed).long().argmax()), (canvases[row] == folder.facts["mask_token_id"]).any(dim=1)
        numbers = torch.zeros(canvases.shape[1], 1, len(ids), 2, dtype=torch.float64)
        for place, key in enumerate(("draws", "keep_draws")):
            if f"{name}.{key}" in stored:
                drawn = (stored[f"{name}.{key}"][row].double() + 0.5) / 65536
                numbers[: len(drawn), 0, :, place] = drawn
        numbers[:, :, 1:, 0] = numbers[:, :, :-1, 0].clone()  # the draw at i proposes the token of i + 1
        hooks = [given_draws("hook_uniform", numbers), *_fixed(ids, fixed, prefix)]
        more = {"gen_length": len(ids) - prefix, "hooks": hooks}
        yield StoredRun(
            number, [ids[:prefix].tolist()], settings | more, canvases[:, masked], result, slice(row, row + 1)
        )


def _fixed(ids: Int[Tensor, " pos"], fixed: Bool[Tensor, " pos"], prefix: int) -> list[tuple[str, Any]]:
    """Hooks that write the tokens that are given after a gap into the first canvas; and propose the first id of the
    input at position 0, which nothing predicts.
    """

    def fill(value: Tensor, hook: Any) -> Tensor:
        if hook.step == 0:
            value[0, fixed] = ids[fixed].to(value.device)
        return value

    def propose_first(value: Tensor, hook: Any) -> Tensor:
        value[:, 0] = ids[0]
        return value

    return [("denoise.hook_canvas", fill), *([] if prefix else [("denoise.hook_candidates", propose_first)])]
