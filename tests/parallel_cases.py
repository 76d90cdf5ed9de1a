"""What a model shows, for the comparison of one process with several; the file is also the script of each process.

torchrun --nproc-per-node 2 tests/parallel_cases.py FOLDER OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from layouts import arguments
from torch import Tensor

import sinklens
from sinklens.hooks.sharding import Sharding

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # family, plans
    "llada": ("llada", {"tp_plan": "auto"}),
    "dream": ("dream", {"tp_plan": "auto"}),
    "sdar": ("sdar", {"tp_plan": "auto"}),
    "llama": ("llama", {"tp_plan": "auto"}),
    "llada-moe": ("llada-moe", {"tp_plan": "auto"}),
    "llada-moe-experts": ("llada-moe", {"tp_plan": "auto", "ep_plan": "auto"}),
}
EDITED = ("hook_q", "hook_v", "hook_attn_mask", "hook_pattern", "hook_z", "hook_result")
GATHERED: list[list[int]] = []


def observed(model: Any) -> dict[str, Any]:
    """Logits, every point, logits under edits of some heads, a run's tokens and sink scores, and some weights."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids)
        points = dict(model.run_with_cache(ids)[1].items())
        edited = {name: model.run_with_hooks(ids, fwd_hooks=[(f"blocks.1.attn.{name}", change)]) for name in EDITED}
        edited["mlp"] = model.run_with_hooks(ids, fwd_hooks=[(lambda name: name.endswith("mlp.hook_post"), change)])
    GATHERED.clear()
    run = sinklens.generate(model, ids[:1, :4], gen_length=8)
    return {
        "logits": logits, "points": points, "edited": edited, "tokens": run.tokens, "gathered": list(GATHERED),
        "sinks": torch.as_tensor(run.sinks.data["score"].values), "W_Q": model.W_Q, "W_O": model.W_O,
        "fingerprint": model.fingerprint,
    }  # fmt: skip


def change(value: Tensor, hook: Any) -> Tensor:
    """Another value for every second entry of the second axis from the end, and for the last head."""
    changed = value.clone()
    changed[..., ::2] = changed[..., ::2] * 0.5 - 0.25
    axis = 2 if value.ndim == 4 and hook.name.endswith(("q", "v", "z", "result")) else 1
    changed.select(axis, -1).mul_(2)
    return changed


def _counted(gathered: Any) -> Any:
    def count(self: Sharding, value: Tensor, axis: int) -> Tensor:
        GATHERED.append(list(value.shape))
        return gathered(self, value, axis)

    return count


def main(folder: Path, out: Path) -> None:
    """Observe every case in this process, one of several."""
    Sharding.gathered = _counted(Sharding.gathered)  # type: ignore[method-assign]
    for name, (family, plans) in CASES.items():
        found = observed(sinklens.load(folder / family, **plans, **arguments(family)))
        rank = torch.distributed.get_rank()
        torch.save(found, out / f"{name}-{rank}.pt")
    (out / f"done-{rank}.json").write_text(json.dumps(list(CASES)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
