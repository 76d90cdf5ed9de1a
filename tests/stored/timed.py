"""The stored runs of MDLM, BD3-LM, SEDD, Duo and GIDD, as runs of sinklens with the stored random numbers.

The references draw a token with uniform numbers, which the data keep as integers: k stands for (k + 0.5) / 65536.
`given_draws` puts them at ``denoise.hook_uniform``. The position that BD3-LM's first hitting chose goes to
``denoise.hook_commit``.

Limitation: a run of sinklens ends when nothing is masked, and the references go on. Only the steps before are compared;
the canvases after them equal the result.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from stored.draws import given_draws
from stored.folders import ReferenceFolder, StoredRun
from torch import Tensor

from sinklens.interventions import Suffix


def mdlm(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Runs of both repositories."""
    if given["sampler"] == "semi_ar":
        yield _windows(folder, number, given)
    elif given["sampler"] in ("ancestral_cache", "psi"):
        yield _updates(folder, number, given, {"sampler": "remdm"})
    else:
        settings = {"predictor": given["sampler"], "steps": given["steps"], "noise_removal": given["noise_removal"]}
        yield _until_decided(folder, number, given["length"], given["batch"], settings)


def sedd(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Runs with and without fixed tokens, which are the prompt and the text after the answer."""
    settings = {"predictor": given["sampler"], "steps": given["steps"], "noise_removal": given["denoise"]}
    run = _until_decided(folder, number, given["length"], given["batch"], settings)
    if "fixed_positions" in given:
        before = sum(place == index for index, place in enumerate(given["fixed_positions"]))
        tokens = given["fixed_tokens"]
        run.settings["gen_length"] -= len(tokens)
        run.settings["hooks"] += [Suffix(text=tokens[before:])] if tokens[before:] else []
        run = run._replace(prompt=[tokens[:before]])
    yield run


def duo(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Ancestral, greedy and ψ runs, each from the stored random tokens."""
    yield _updates(folder, number, given, {"start_canvas": folder.tensors[f"gen{number}.start"]})


def gidd(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Denoising runs, and self-corrections."""
    if "corrections_per_row" in given:
        yield _corrections(folder, number, given)
        return
    settings = {"steps": given["num_denoising_steps"], "min_p": given["min_p"]}
    canvases = _entered(folder, number, given["num_denoising_steps"])
    yield _run(folder, number, given["length"], settings, _uniform(folder, number)[..., None], canvases)


def bd3lm(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    """Runs block by block; a token 0 that one writes at time 0, a defect, is not compared."""
    stored, size = folder.tensors, given["length"]
    entering, after = stored[f"gen{number}.entering"].long(), stored[f"gen{number}.canvas"].long()
    draws = _uniform(folder, number)
    uniform = torch.zeros(*entering.shape, draws.shape[-1], dtype=draws.dtype)
    for step, block in enumerate(((entering >= 0).sum(dim=2)[:, 0] // draws.shape[2] - 1).tolist()):
        uniform[step, :, block * draws.shape[2] : (block + 1) * draws.shape[2]] = draws[step]
    settings = {name: given[name] for name in ("first_hitting", "num_steps", "nucleus_p")}
    settings |= {"sliding": True} if size > folder.load().cfg.n_ctx else {}
    run = _run(folder, number, size - 1, settings, uniform, entering.transpose(0, 1))
    if given["first_hitting"]:
        run.settings["hooks"].append(given_draws("hook_commit", entering != after))
    result = run.result.masked_fill(run.result == 0, -1) if given["token_0_written_at_t_0"] else run.result
    yield run._replace(prompt=[[folder.facts["bos_token_id"]]], result=result)


def _uniform(folder: ReferenceFolder, number: int) -> Float[Tensor, "step batch *drawn"]:
    """The numbers that tokens were drawn with, those of a closing step included."""
    stored, name = folder.tensors, f"gen{number}.draws"
    draws = (stored[name].double() + 0.5) / 65536
    if f"{name}_denoise" not in stored:
        return draws
    closing = (stored[f"{name}_denoise"].double() + 0.5) / 65536  # without the mask
    return torch.cat([draws, torch.nn.functional.pad(closing, (0, 1))[None]])


def _entered(folder: ReferenceFolder, number: int, steps: int) -> Int[Tensor, "batch step pos"]:
    """The canvases that the first `steps` steps worked on: the first one, and those that the updates left."""
    stored = folder.tensors
    first = stored.get(f"gen{number}.start")
    first = stored[f"gen{number}.entering"][0] if first is None else first
    return torch.cat([first[None], stored[f"gen{number}.canvas"]])[:steps].transpose(0, 1).long()


def _run(
    folder: ReferenceFolder,
    number: int,
    length: int,
    settings: dict[str, Any],
    uniform: Tensor,
    canvases: Int[Tensor, "batch step pos"],
) -> StoredRun:
    """A run without a prompt."""
    settings = settings | {"gen_length": length, "hooks": [given_draws("hook_uniform", uniform)]}
    empty = torch.zeros(len(canvases), 0, dtype=torch.long)
    return StoredRun(number, empty, settings, canvases, folder.tensors[f"gen{number}.result"].long())


def _updates(folder: ReferenceFolder, number: int, given: dict[str, Any], more: dict[str, Any]) -> StoredRun:
    """A run of s-sahoo/duo."""
    settings = {"steps": given["steps"], "final_step": given["noise_removal"], "top_p": given["p_nucleus"]}
    settings |= {"eps": given["eps"], **given.get("psi", {}), **more}
    steps = len(folder.tensors[f"gen{number}.canvas"]) + (given["noise_removal"] == "greedy")
    canvases = _entered(folder, number, steps)
    return _run(folder, number, given["length"], settings, _uniform(folder, number), canvases)


def _until_decided(folder: ReferenceFolder, number: int, length: int, rows: int, settings: dict[str, Any]) -> StoredRun:
    """A run whose steps change masks only: its canvases up to the first without any."""
    every = _entered(folder, number, settings["steps"] + settings["noise_removal"])
    masked = (every == folder.facts["mask_token_id"]).any(dim=2).any(dim=0).long().cumprod(dim=0).bool()
    return _run(folder, number, length, settings, _uniform(folder, number), every[:, masked])


def _windows(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> StoredRun:
    """MDLM's moving window; canvases and numbers at their places in the text."""
    stored, mask = folder.tensors, folder.facts["mask_token_id"]
    length, stride, steps = given["length"], given["stride_length"], round(1 / given["dt"])
    entering, draws = stored[f"gen{number}.entering"].long(), _uniform(folder, number)
    masked = (entering == mask).flatten(1).any(dim=1).nonzero()[:, 0].tolist()  # the others change nothing
    total = length + stride * given["num_strides"]
    canvases = torch.full((1, len(masked), total), -1)
    uniform = torch.zeros(len(masked), 1, total, draws.shape[-1], dtype=draws.dtype)
    for place, step in enumerate(masked):
        window = slice(stride * (step // (steps + 1)), stride * (step // (steps + 1)) + length)
        canvases[:, place, window], uniform[place, :, window] = entering[step], draws[step]
    settings = {"sampler": "mdlm-windows", "window_length": length, "stride_length": stride, "window_steps": steps}
    return _run(folder, number, total, settings, uniform, canvases)


def _corrections(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> StoredRun:
    """GIDD's self-correction; the reference corrects row after row."""
    stored, counts = folder.tensors, given["corrections_per_row"]
    most, length = max(counts), given["length"]
    uniform, canvases = torch.zeros(most, len(counts), length), torch.full((len(counts), most, length), -1)
    for row, part in enumerate(_uniform(folder, number).split(counts)):
        uniform[: len(part), row] = part.float()
        entering = stored[f"gen{number}.entering"][stored[f"gen{number}.row"] == row].long()
        canvases[row, : counts[row]] = entering[1:]  # the first call of a row has no effect
    names = ("temperature", "t0", "early_stopping", "early_stopping_patience")
    settings = {"sampler": "gidd-self-correction", "steps": given["num_inference_steps"]}
    settings |= {"start_canvas": stored[f"gen{number}.start"], **{name: given[name] for name in names}}
    return _run(folder, number, length, settings, uniform[..., None], canvases)
