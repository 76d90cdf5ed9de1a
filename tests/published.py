"""Reference data of the block-diffusion models: checkpoints, passes and runs that the models' own code computed."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import sinklens


class Reference:
    """One folder of reference data.

    Attributes:
        folder: the folder.
        tensors: its expected.safetensors.
        facts: its expected.json.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Tensor] = load_file(folder / "expected.safetensors")
        self.facts: dict[str, Any] = json.loads((folder / "expected.json").read_text())

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The settings of the stored runs."""
        return self.facts["generate"]

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return json.loads((self.folder / "config.json").read_text())

    def write(self, folder: Path, **changes: Any) -> Path:
        """A copy of the checkpoint with other values in config.json.

        The public checkpoints name the mask token in their tokenizer, which these folders lack.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config() | {"mask_token_id": self.facts["mask_token_id"]} | changes
        (folder / "config.json").write_text(json.dumps(config))
        for part in ("model.safetensors", "linear_spec_lora"):
            if (self.folder / part).exists() and not (folder / part).exists():
                (folder / part).symlink_to(self.folder / part)
        return folder

    def loader(self, place: Path) -> Any:
        """A function that loads the checkpoint: ``load(changes of the config, arguments of sinklens.load)``."""

        @cache
        def load(changes: tuple[tuple[str, Any], ...] = (), arguments: tuple[tuple[str, Any], ...] = ()) -> Any:
            folder = self.write(place / str(abs(hash((changes, arguments)))), **dict(changes))
            return sinklens.load(folder, **dict(arguments))

        return load


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape."""
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def assert_same_pass(model: sinklens.Model, reference: Reference, tolerance: float) -> None:
    """A single pass has the reference's logits and patterns, and its sink scores are their column sums.

    The logits are compared with nothing watched, and with the patterns or the sink scores watched, which use other
    code paths.
    """
    ids, pattern = reference.tensors["input_ids"], reference.tensors["pattern"]
    with torch.no_grad():
        plain = model(ids)
        explicit, patterns = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
        fused, sinks = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_sink_scores"))
    for logits in (plain, explicit, fused):
        assert largest_difference(logits, reference.tensors["logits"]) < tolerance
    for layer in range(model.cfg.n_layers):
        assert largest_difference(patterns["pattern", layer], pattern[:, layer]) < tolerance
        scores = sinks[f"blocks.{layer}.attn.hook_sink_scores"]
        assert largest_difference(scores, pattern[:, layer].sum(dim=2)) < tolerance


def assert_same_canvases(run: sinklens.Generation, canvas: Tensor, result: Tensor) -> None:
    """Every step of `run` worked on the reference's canvas, where that has positions (-1: none yet)."""
    assert run.steps_run == canvas.shape[1]
    for step in range(run.steps_run):
        stored = canvas[:, step]
        ours = run.canvas[:, step, : stored.shape[1]]
        assert (ours[stored >= 0] == stored[stored >= 0]).all(), f"step {step}"
    assert (run.tokens[:, : result.shape[1]] == result).all()


def sdar_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """The settings of a stored run of SDAR under our names."""
    names = {"confidence_threshold": "threshold", "dynamic_threshold": "threshold", "threshold": "threshold"}
    names |= {"eb_threshold": "eb_threshold", "denoising_steps": "denoising_steps"}
    found = {ours: stored[theirs] for theirs, ours in names.items() if theirs in stored}
    found["remasking_strategy"] = stored.get("remasking_strategy")
    found["gen_length"] = stored.get("gen_length") or stored["max_tokens"]
    found["stop"] = bool(stored.get("stopping_criteria_idx") or stored.get("eos_token_id"))
    if stored["sampler"] == "opencompass":
        kind = "dynamic" if stored["threshold"] < 1 else "static"
        found |= {"remasking_strategy": f"low_confidence_{kind}", "confidence_of": "model"}
    if stored["draw"] == "top_k=1":  # drawn from a distribution over one token
        found |= {"temperature": stored["temperature"], "top_k": 1}
    return found


def sdar_model(load: Any, stored: dict[str, Any]) -> sinklens.Model:
    """SDAR with the blocks and end tokens of a stored run."""
    ends = stored.get("stopping_criteria_idx") or stored.get("eos_token_id")
    changes = (("eos_token_id", tuple(ends) if isinstance(ends, list) else ends),) if ends else ()
    return load(changes, (("block_length", stored["block_length"]),))


def assert_same_routing(model: sinklens.Model, reference: Reference, tolerance: float) -> None:
    """Router logits, chosen experts and their weights equal the reference's, which orders experts by number."""
    with torch.no_grad():
        _, kept = model.run_with_cache(reference.tensors["input_ids"], names_filter=lambda name: ".mlp." in name)
    for layer in range(model.cfg.n_layers):
        stored = {what: reference.tensors[f"router.{layer}.{what}"] for what in ("logits", "weights", "experts")}
        found, order = kept[f"blocks.{layer}.mlp.hook_expert_indices"].sort(dim=-1)
        assert torch.equal(found, stored["experts"].long())
        assert largest_difference(kept[f"blocks.{layer}.mlp.hook_router_logits"], stored["logits"]) < tolerance
        weights = kept[f"blocks.{layer}.mlp.hook_expert_weights"].gather(-1, order)
        assert largest_difference(weights, stored["weights"]) < tolerance
