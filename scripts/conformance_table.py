"""Print the differences between sinklens and the models' reference code as a Markdown table.

The reference outputs are read from the folder given as argument, by default from the archives in tests/reference_data.
Differences are the largest absolute ones in float32. Sink scores are computed from the log-sum-exp of fused
attention and compared with the column sums of the explicit pattern of the same model. A run counts as equal if all of
its canvases, and its result, equal the reference's token for token. docs/models.md counts the stored runs that are not
repeated because they show a defect of a reference.
"""

import sys
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from references import unpack
from stored.runs import FOLDERS, open_folder, stored_pass, stored_runs

HEAD = "| checkpoint | logits | patterns | sink scores | runs equal | canvases equal |\n|---|---|---|---|---|---|"


class Row(NamedTuple):
    """One checkpoint's line.

    Attributes:
        logits, patterns, sinks: largest absolute differences; NaN for patterns that the reference did not keep.
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
        patterns = "not stored" if isnan(self.patterns) else f"{self.patterns:.1e}"
        return (
            f"| {self.name} | {self.logits:.1e} | {patterns} | {self.sinks:.1e} "
            f"| {self.runs_equal} of {self.runs} | {self.canvases_equal} of {self.canvases} |"
        )


def furthest(found: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference."""
    return (found - wanted).abs().max().item()


def measure(path: Path) -> Row:
    """Compare one checkpoint."""
    folder = open_folder(path)
    model, stored = folder.load(block_length=folder.pass_block_length), stored_pass(folder)
    layers = range(model.cfg.n_layers)
    given = stored.arguments("cpu")
    with torch.no_grad():
        logits = model(stored.ids, **given)
        _, maps = model.run_with_cache(stored.ids, names_filter=lambda name: name.endswith("hook_pattern"), **given)
        _, sums = model.run_with_cache(stored.ids, names_filter=lambda name: name.endswith("hook_sink_scores"), **given)
    pairs = [(sums[f"blocks.{layer}.attn.hook_sink_scores"], maps["pattern", layer].sum(dim=2)) for layer in layers]
    runs = [run.equal(folder.repeat(run, record_sinks=False)) for run in stored_runs(folder)]
    return Row(
        path.name,
        furthest(logits, stored.logits),
        max((furthest(maps["pattern", layer], one) for layer, one in enumerate(stored.patterns)), default=nan),
        max(furthest(found, wanted) for found, wanted in pairs),
        len(runs),
        sum(all(run) for run in runs),
        sum(len(run) for run in runs),
        sum(sum(run) for run in runs),
    )


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        print_table(Path(sys.argv[1]))
        return
    with TemporaryDirectory() as folder:
        print_table(unpack(Path(folder)))


def print_table(root: Path) -> None:
    """One row per folder of references in `root`."""
    if not root.is_dir():
        sys.exit(f"{root} is not a folder; give the folder that contains {', '.join(FOLDERS)}.")
    print(HEAD)
    for name in FOLDERS:
        if (root / name).is_dir():
            print(measure(root / name), flush=True)


if __name__ == "__main__":
    main()
