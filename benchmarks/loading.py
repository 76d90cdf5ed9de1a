"""Time and memory of loading a large checkpoint, beside transformers' own ``from_pretrained``.

    python -m benchmarks.loading FOLDER [--layers 16] [--repeats 2] [--dtypes bfloat16 float32]

A Llama checkpoint of random weights in bfloat16 is written to FOLDER, in four files, and deleted afterwards; with 16
layers of LLaDA's kind at d_model 2048 it has 2.4 GB. A checkpoint that an interrupted call left there is used again.
Each measurement is a process of its own, in turns: load a tiny model, so that everything is imported, then the
checkpoint, then read every weight once, since on a CPU weights in their stored type stay memory-mapped until then.

Private memory is what the process allocates; resident memory includes pages of the files, which the system takes back.
Both are sampled every 5 ms.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FILES = 4


def write(folder: Path, layers: int) -> int:
    """Write the checkpoint; returns the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).state_dict()
    folder.mkdir(parents=True)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    place: dict[str, str] = {}
    total = 0
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = {key: torch.empty(empty[key].shape, dtype=torch.bfloat16).normal_(std=0.02)
                for key in list(empty)[number::FILES]}  # fmt: skip
        save_file(part, folder / name, metadata={"format": "pt"})
        place |= dict.fromkeys(part, name)
        total += sum(value.nbytes for value in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def status(name: str) -> float:
    """A line of /proc/self/status in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1e6


class Peaks:
    """Peaks of resident and private memory in GB above those at the start, inside a ``with`` block."""

    def __enter__(self) -> "Peaks":
        self.resident = self.private = 0.0
        self._start, self._ended = (status("VmRSS"), status("RssAnon")), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.resident = max(self.resident, status("VmRSS") - self._start[0])
            self.private = max(self.private, status("RssAnon") - self._start[1])


def with_sinklens(folder: Path, dtype: torch.dtype) -> Any:
    """`sinklens.load` without its self-check, which runs passes."""
    import sinklens

    return sinklens.load(folder, dtype=dtype, device="cpu", check=False).hf


def with_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """transformers alone."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def measure(load: Callable[[Path, torch.dtype], Any], folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of loading and of the first read, processor seconds, and peaks in GB."""
    import sinklens

    sinklens.load("tiny-llama", check=False)  # imports what is imported late
    started, processor = time.perf_counter(), time.process_time()
    with Peaks() as peaks:
        model = load(folder, dtype)
        loaded = time.perf_counter()
        for value in model.parameters():
            value.view(-1)[::1024].float().sum()  # one number of each page
        read = time.perf_counter()
    return {
        "load": loaded - started, "read": read - loaded, "processor": time.process_time() - processor,
        "resident": peaks.resident, "private": peaks.private,
    }  # fmt: skip


def apart(*given: Any) -> dict[str, float]:
    """`measure` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, given)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    options = parser.parse_args()
    folder = options.folder / "loading-checkpoint"
    index = folder / "model.safetensors.index.json"
    total = json.loads(index.read_text())["metadata"]["total_size"] if index.exists() else write(folder, options.layers)
    print(f"{total / 1e9:.2f} GB of weights in {FILES} files\n")
    print("| loaded as | by | load | first read | processor time | peak, resident | peak, private |")
    print("|---|---|---|---|---|---|---|", flush=True)
    try:
        for dtype in (getattr(torch, name) for name in options.dtypes):
            for _ in range(options.repeats):
                for name, load in (("sinklens", with_sinklens), ("transformers", with_transformers)):
                    r = apart(load, folder, dtype)
                    print(
                        f"| {str(dtype).removeprefix('torch.')} | {name} | {r['load']:.1f} s | {r['read']:.1f} s | "
                        f"{r['processor']:.1f} s | {r['resident']:.2f} GB | {r['private']:.2f} GB |", flush=True,
                    )  # fmt: skip
    finally:
        shutil.rmtree(folder)
        print(f"deleted {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
