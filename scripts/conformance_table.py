"""Print the differences between sinklens and the models' reference code as a Markdown table.

The reference outputs are read from the folder given as argument, by default ``../shared/conformance`` next to the
checkout. Differences are the largest absolute ones in float32. Sink scores are computed from the log-sum-exp of fused
attention and compared with the column sums of the explicit pattern of the same model. A run counts as equal if all of
its canvases, and so its result, equal the reference's token for token.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

import sinklens

DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "conformance"
FOLDERS = ("llada-mha", "llada-gqa", "dream-gqa", "mmada")
HEAD = "| checkpoint | logits | patterns | sink scores | runs equal | canvases equal |\n|---|---|---|---|---|---|"


class Row(NamedTuple):
    """One checkpoint's line.

    Attributes:
        logits, patterns, sinks: largest absolute differences.
        runs, runs_equal: number of runs compared, and of runs whose canvases are all equal.
        canvases, canvases_equal: number of canvases compared (one per step, for the complete batch), and of equal ones.
    """

    name: str
    logits: float
    patterns: float
    sinks: float
    runs: int
    runs_equal: int
    canvases: int
    canvases_equal: int

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.logits:.1e} | {self.patterns:.1e} | {self.sinks:.1e} "
            f"| {self.runs_equal} of {self.runs} | {self.canvases_equal} of {self.canvases} |"
        )


def furthest(found: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference."""
    return (found - wanted).abs().max().item()


def per_layer(model: sinklens.Model, ids: Tensor, point: str) -> Tensor:
    """Values of an attention hook point in all layers, [batch, layer, ...]."""
    names = [f"blocks.{layer}.attn.{point}" for layer in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(ids, names_filter=names)
    return torch.stack([cache[name] for name in names], dim=1)


def compare_run(
    model: sinklens.Model, expected: dict[str, Tensor], number: int, settings: dict[str, Any]
) -> list[bool]:
    """Whether each canvas of a run, in the order of steps, and its result equal the reference's."""
    if "max_new_tokens" in settings:
        settings["gen_length"] = settings.pop("max_new_tokens")
    run = sinklens.generate(model, expected[f"gen{number}.prompt"], record_sinks=False, **settings)
    if f"gen{number}.history" in expected:
        found, wanted = run.canvas[:, 1:], expected[f"gen{number}.history"]
    else:
        found = run.canvas
        wanted = torch.cat([expected[f"gen{number}.canvas"], expected[f"gen{number}.result"][:, None]], dim=1)
    if found.shape != wanted.shape:
        return [False] * wanted.shape[1]
    return [torch.equal(found[:, step], wanted[:, step]) for step in range(wanted.shape[1])]


def measure(folder: Path) -> Row:
    """Compare one checkpoint."""
    model, expected = sinklens.load(folder, dtype="float32", device="cpu"), load_file(folder / "expected.safetensors")
    ids = expected["input_ids"]
    with torch.no_grad():
        logits, patterns = model(ids), per_layer(model, ids, "hook_pattern")
        sinks = per_layer(model, ids, "hook_sink_scores")
    runs = [
        compare_run(model, expected, number, settings)
        for number, settings in enumerate(json.loads((folder / "expected.json").read_text())["generate"])
    ]
    return Row(
        folder.name,
        furthest(logits, expected["logits"]),
        furthest(patterns, expected["pattern"]),
        furthest(sinks, patterns.sum(dim=3)),
        len(runs),
        sum(all(run) for run in runs),
        sum(len(run) for run in runs),
        sum(sum(run) for run in runs),
    )


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    if not root.is_dir():
        sys.exit(f"{root} is not a folder; give the folder that contains {', '.join(FOLDERS)}.")
    print(HEAD)
    for name in FOLDERS:
        print(measure(root / name), flush=True)


if __name__ == "__main__":
    main()
