"""The stored runs of each folder of reference data, as runs of sinklens.

`FOLDERS` lists the folders that can be read, with the function that translates their runs. Runs that show a defect of a
reference, which sinklens does not copy, are left out; docs/models.md counts them.

Limitation: where the reference treats the rows of a batch together (padding on the right), only its longest row is
repeated.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from stored import modes, timed
from stored.draws import given_draws, given_starts
from stored.folders import ReferenceFolder, StoredRun
from torch import Tensor

from sinklens.families import SAMPLERS
from sinklens.interventions import Suffix
from sinklens.sampling import DualCache, NoCache, Policy, PrefixCache

Translate = Callable[[ReferenceFolder, int, dict[str, Any]], Iterator[StoredRun]]


class StoredPass(NamedTuple):
    """A single pass of the reference.

    Attributes:
        ids: its input, without padding; the canvas is at the end if the model has one.
        logits: of all positions, or of the canvas.
        patterns: of each layer, [batch, head, query, key]; none where the reference kept none.
        time: noise level of each row; None for a model that is not conditioned on it.
        mode: what the pass is, in a model that changes its attention.
    """

    ids: Int[Tensor, "batch pos"]
    logits: Float[Tensor, "batch _ vocab"]
    patterns: list[Tensor]
    time: Float[Tensor, " batch"] | None = None
    mode: Mapping[str, Any] = {}

    def arguments(self, device: torch.device | str) -> dict[str, Any]:
        """The arguments of a pass of sinklens besides the ids."""
        return dict(self.mode) if self.time is None else {"time": self.time.to(device), **self.mode}


class StoredFormat(NamedTuple):
    """How a folder is read.

    Attributes:
        runs: the runs of sinklens that repeat a stored run: none, one, or one for each row.
        sampler: whose settings the stored ones are.
        family: for `load`, where config.json does not say it.
    """

    runs: Translate
    sampler: str
    family: str | None = None


def stored_runs(folder: ReferenceFolder) -> list[StoredRun]:
    """All runs of a folder that can be repeated."""
    translate = FOLDERS[folder.path.name].runs
    return [run for number, given in enumerate(folder.runs) for run in translate(folder, number, given)]


def stored_run(folder: ReferenceFolder, number: int) -> StoredRun:
    """The run of this number, or its first row if rows are repeated one by one."""
    return next(run for run in stored_runs(folder) if run.number == number)


@cache
def open_folder(path: Path) -> ReferenceFolder:
    """The folder at `path`, whose name is in `FOLDERS`."""
    return ReferenceFolder(path, FOLDERS[path.name].family)


def stored_pass(folder: ReferenceFolder) -> StoredPass:
    """The stored pass of a folder."""
    expected = folder.tensors
    if "pass0.logits" in expected:
        first = {name.removeprefix("pass0."): value for name, value in expected.items() if name.startswith("pass0.")}
        time = next(first[name] for name in ("sigma_used", "sigma", "t") if name in first)
        return StoredPass(expected["input_ids"].long(), first["logits"], _patterns(first), time)
    if "input_ids" in expected:
        return StoredPass(expected["input_ids"], expected["logits"], _patterns(expected), mode=_mode(folder))
    ids = torch.cat([expected["fwd0.input_ids"], expected["fwd0.canvas"]], dim=1)
    layers = [name for name in expected if name.startswith("fwd0.decoder.pattern.")]
    patterns = [expected[f"fwd0.decoder.pattern.{layer}"] for layer in range(len(layers))]
    return StoredPass(ids, expected["fwd0.decoder.logits"], patterns)


def _mode(folder: ReferenceFolder) -> dict[str, Any]:
    """The mode of the stored pass: a model with modes denoises the last block."""
    if folder.path.name != "nemotron-diffusion":
        return {}
    size = json.loads((folder.path / "config.json").read_text())["block_size"]
    return {"mode": "denoise", "block_start": folder.tensors["input_ids"].shape[1] - size}


def _patterns(expected: dict[str, Tensor]) -> list[Tensor]:
    return list(expected["pattern"].unbind(1)) if "pattern" in expected else []


def _named(folder: ReferenceFolder, given: dict[str, Any]) -> dict[str, Any]:
    """The settings that the folder's sampler has; `max_new_tokens` is `gen_length`."""
    known = SAMPLERS[FOLDERS[folder.path.name].sampler].settings()
    renamed = {"gen_length" if key == "max_new_tokens" else key: value for key, value in given.items()}
    return {key: value for key, value in renamed.items() if key in known and value is not None}


def _parts(folder: ReferenceFolder, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prompt, canvases and result of a stored run."""
    canvas = folder.tensors.get(f"gen{number}.canvas", folder.tensors.get(f"gen{number}.history"))
    assert canvas is not None
    return folder.tensors[f"gen{number}.prompt"], canvas, folder.tensors[f"gen{number}.result"]


def _plain(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    after = f"gen{number}.canvas" not in folder.tensors
    prompt, canvas, result = _parts(folder, number)
    yield StoredRun(number, prompt, _named(folder, given), canvas, result, after=after)


def _sdar(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    ends = given.get("stopping_criteria_idx") or given.get("eos_token_id")
    same = ("eb_threshold", "denoising_steps", "remasking_strategy")
    settings = {name: given[name] for name in same if name in given}
    settings |= {"gen_length": given.get("gen_length") or given["max_tokens"], "stop": bool(ends)}
    for name in ("confidence_threshold", "dynamic_threshold", "threshold"):
        settings |= {"threshold": given[name]} if name in given else {}
    if given["sampler"] == "opencompass":
        kind = "dynamic" if given["threshold"] < 1 else "static"
        settings |= {"remasking_strategy": f"low_confidence_{kind}", "confidence_of": "model"}
    if given["draw"] == "top_k=1":  # drawn from a distribution over one token
        settings |= {"temperature": given["temperature"], "top_k": 1}
    prompt, canvas, result = _parts(folder, number)
    changes = {"eos_token_id": ends} if ends else {}
    yield StoredRun(number, prompt, settings, canvas, result, None, changes, given["block_length"])


def _bd3lm(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    prompt, canvas, result = _parts(folder, number)
    prompts = [[token for token in row if token >= 0] for row in prompt.tolist()]
    settings: dict[str, Any] = {name: given[name] for name in ("cfg_scale", "right_shift_logits") if name in given}
    settings |= {"gen_length": given["max_new_tokens"]}
    changes, rows = {"eos_token_id": given["eos_token_id"]}, slice(None)
    if given["sampler"] == "model card":
        blocks = -(-given["max_new_tokens"] // given["block_size"])
        settings |= {"sampler": "bd3lm-card", "denoising_steps": -(-given["steps"] // blocks)}
        longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
        prompts, rows = [prompts[longest]], slice(longest, longest + 1)
    else:
        settings |= {"steps": given["steps"]}
        start = int((canvas[:, 0] == folder.facts["mask_token_id"]).long().argmax(1).max())
        lengths = torch.tensor([start - len(row) for row in prompts])[:, None]
        padding = torch.arange(canvas.shape[2]) < lengths  # whose token differs
        canvas, result = canvas.masked_fill(padding[:, None], -1), result.masked_fill(padding[:, : result.shape[1]], -1)
        hidden = torch.tensor([given["eos_token_id"], given["pad_token_id"]])
        if torch.isin(result[:, start:], hidden).any():
            return  # it continued a row after its end token, or drew the padding token, which it then hides
    yield StoredRun(number, prompts, settings, canvas, result, rows, changes, given["block_size"])


def _fast_dllm_v2(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    prompt, canvas, result = _parts(folder, number)
    size, length = given["block_size"], prompt.shape[1]
    if given["sampler"] != "generate" or length == size:
        return
    settings = {"small_block_size": given["small_block_size"], "threshold": float(given["threshold"])}
    settings |= {"gen_length": (length // size + given["max_new_tokens"] // size) * size + 1 - length}
    settings |= {"use_block_cache": True} if given.get("use_block_cache") else {}
    changes = {"eos_token_id": given["stop_token"]}
    yield StoredRun(number, prompt, settings, canvas, result, None, changes, size, first_in_pass=size)


def _llada2(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    prompt, canvas, _ = _parts(folder, number)
    ends = given["eos_id"] >= 0
    settings = {"gen_length": given["gen_length"], "threshold": given["threshold"]}
    if given["sampler"] == "llada2.1":
        settings |= {name: given[name] for name in ("editing_threshold", "max_post_steps", "num_to_transfer")}
        settings |= {"sampler": "llada2.1", "stop": given["eos_early_stop"]}
    else:
        settings |= {"denoising_steps": given["steps"], "minimal_topk": given["minimal_topk"]}
        settings |= {"eos_early_stop": given["eos_early_stop"], "stop": ends}
    changes, size = ({"eos_token_id": given["eos_id"]} if ends else {}), given["block_length"]
    yield StoredRun(number, prompt, settings, canvas, folder.tensors[f"gen{number}.final"], None, changes, size)


def _rnd1(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    room = given["seq_len"] - given["prefix_length"] - given["suffix_length"] - 1
    settings = {key: given[key] for key in ("temperature", "eb_gamma", "top_k", "greedy") if given[key] is not None}
    settings |= {"gen_length": min(given["infill_length"] or room, room), "steps": given["num_steps"]}
    settings |= {"closing": "eos" if given["add_eos_at_end"] else "pad"}
    if f"gen{number}.suffix" in folder.tensors:
        settings["hooks"] = [Suffix(text=folder.tensors[f"gen{number}.suffix"][0].tolist())]
    prompt, canvas, result = _parts(folder, number)
    yield StoredRun(number, prompt, settings, canvas, result)


def _open_dcoder(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    prompt, canvas, result = _parts(folder, number)
    settings = _named(folder, given["settings"])
    if "gen_length" in settings:
        yield StoredRun(number, prompt, settings, canvas, result)
        return
    mask = folder.facts["mask_token_id"]
    for place, row in enumerate(canvas[:, 0].tolist()):  # infilling, whose gaps differ from row to row
        start, count = row.index(mask), row.count(mask)
        settings = settings | {"gen_length": count, "hooks": [Suffix(text=row[start + count :])]}
        yield StoredRun(number, [row[:start]], settings, canvas, result, slice(place, place + 1))


def _diffusion_gemma(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    expected = folder.tensors
    ids = expected[f"gen{number}.prompt"]
    if given.get("cached_tokens_at_start"):  # continues run 1, whose cache lacks its last canvas
        ids = torch.cat([expected["gen1.sequences"][:, :-CANVAS], ids], dim=1)
    settings = {name: value for name, value in given["settings"].items() if name not in ("eos_token_id", "max_length")}
    length = settings.pop("max_new_tokens", None) or given["settings"]["max_length"] - ids.shape[1]
    settings["gen_length"] = -(-length // CANVAS) * CANVAS
    starts: Tensor | None = expected[f"gen{number}.draws.init"]
    if f"gen{number}.decoder_input_ids" in expected:
        settings["start_canvas"], starts = expected[f"gen{number}.decoder_input_ids"], None
    sampled, renoised = (expected[f"gen{number}.draws.{name}"] for name in ("sample", "renoise"))
    settings["hooks"] = [given_draws("hook_candidates", sampled), given_draws("hook_renoise", renoised)]
    settings["hooks"] += [] if starts is None else [given_starts(starts)]
    prompt = {"input_ids": ids, "attention_mask": expected.get(f"gen{number}.attention_mask", torch.ones_like(ids))}
    canvas = _on_the_text(expected[f"gen{number}.canvas_in"], expected[f"gen{number}.block"], ids.shape[1])
    result = torch.full_like(canvas[:, 0], -1)
    sequences = expected[f"gen{number}.sequences"]
    begin = ids.shape[1] - expected[f"gen{number}.prompt"].shape[1]
    result[:, begin : begin + sequences.shape[1]] = sequences
    ends = given["settings"].get("eos_token_id")
    yield StoredRun(number, prompt, settings, canvas, result, None, {} if ends is None else {"eos_token_id": ends})


def _on_the_text(canvases: Tensor, block: Tensor, start: int) -> Tensor:
    """Canvases [pass, batch, canvas] at their places in the text, [batch, pass, pos]; -1 elsewhere."""
    passes, rows, size = canvases.shape
    found = torch.full((rows, passes, start + (int(block.max()) + 1) * size), -1, dtype=canvases.dtype)
    for number, place in enumerate((start + block * size).tolist()):
        found[:, number, place : place + size] = canvases[number]
    return found


def _llada_cached(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    settings = _named(folder, given["settings"]) | {"cache": POLICIES[given["function"]]}
    settings |= {"by_quota": False} if "threshold" in settings else {}
    prompt, canvas, result = _parts(folder, number)
    yield StoredRun(number, prompt, settings, canvas.transpose(0, 1), result)


def _dream_cached(folder: ReferenceFolder, number: int, given: dict[str, Any]) -> Iterator[StoredRun]:
    policy, stored = POLICIES[given["sampler"]], given["settings"] | {"top_k": 50}  # transformers' default
    by_threshold = stored["alg"] == "confidence_threshold"
    settings = {"gen_length": stored["max_new_tokens"], **{name: stored[name] for name in DREAM if name in stored}}
    settings |= {"alg": "maskgit_plus", "steps": stored["max_new_tokens"]} if by_threshold else {}
    if by_threshold and policy == NoCache():
        settings["tokens_per_step"] = stored["max_new_tokens"] // stored["steps"]
    settings |= {"cache": policy} if policy == NoCache() else {"cache": policy, "sampler": "dream-blocks"}
    prompt, canvas, result = _parts(folder, number)
    blocks = stored["max_new_tokens"] // stored.get("block_length", 1)
    if policy != NoCache() and stored["steps"] == blocks and not by_threshold:
        canvas = canvas[::2]  # with one step per block the reference computes another pass and discards it
    yield StoredRun(number, prompt, settings, canvas.transpose(0, 1), result)


CANVAS = 8
"""``canvas_length`` of the DiffusionGemma data."""
DREAM = ("temperature", "top_k", "eps", "steps", "alg", "block_length", "threshold")
"""Settings of the cached Dream runs that have the same name."""
POLICIES: dict[str, Policy] = {
    "generate": NoCache(), "generate_with_prefix_cache": PrefixCache(), "generate_with_dual_cache": DualCache(),
    "no_cache": NoCache(), "prefix_cache": PrefixCache(), "dual_cache": DualCache(),
}  # fmt: skip
"""Fast-dLLM's functions as cache policies."""
FOLDERS: dict[str, StoredFormat] = {
    "llada-mha": StoredFormat(_plain, "llada"),
    "llada-gqa": StoredFormat(_plain, "llada"),
    "dream-gqa": StoredFormat(_plain, "dream"),
    "llada-cached": StoredFormat(_llada_cached, "llada"),
    "dream-cached": StoredFormat(_dream_cached, "dream"),
    "mmada": StoredFormat(_plain, "llada"),
    "llada-moe": StoredFormat(_plain, "llada"),
    "rnd1": StoredFormat(_rnd1, "rnd1"),
    "open-dcoder": StoredFormat(_open_dcoder, "open-dcoder", family="open-dcoder"),
    "sdar": StoredFormat(_sdar, "sdar"),
    "sdar-moe": StoredFormat(_sdar, "sdar"),
    "bd3lm": StoredFormat(_bd3lm, "bd3lm", family="bd3lm-qwen3"),
    "fast-dllm-v2": StoredFormat(_fast_dllm_v2, "fast-dllm-v2"),
    "llada2-moe": StoredFormat(_llada2, "llada2"),
    "nemotron-diffusion": StoredFormat(modes.nemotron, "nemotron-diffusion"),
    "diffullama": StoredFormat(modes.diffullama, "diffullama", family="diffullama"),
    "diffugpt": StoredFormat(modes.diffullama, "diffullama", family="diffugpt"),
    "diffusion-gemma": StoredFormat(_diffusion_gemma, "diffusion-gemma"),
    "mdlm": StoredFormat(timed.mdlm, "mdlm"),
    "bd3lm-owt": StoredFormat(timed.bd3lm, "bd3lm-owt"),
    "sedd": StoredFormat(timed.sedd, "sedd", family="sedd"),
    "duo": StoredFormat(timed.duo, "duo"),
    "gidd": StoredFormat(timed.gidd, "gidd"),
}
