"""Whether and how a checkpoint is divided among processes, by the plans of transformers' classes.

    torchrun --nproc-per-node 4 study.py            # in study.py: sinklens.load(name, tp_plan="auto")

Every process loads its part of the weights; hooks/sharding.py lets points show complete values. A class without a plan,
and sizes that the number of processes does not divide, are refused before anything is read.
"""

import os
from typing import TYPE_CHECKING, Any

from sinklens.errors import CheckpointError
from sinklens.families import Family
from sinklens.hooks.architectures import architecture_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PLANS = ("tp_plan", "ep_plan")
OTHERS = ("device", "device_map", "quantization")  # arguments of loading that place or change the weights otherwise


def parallel_for(config: "PreTrainedConfig", family: Family, request: Any, where: str) -> Any:
    """transformers' distributed config for a checkpoint; None to load it in this process alone.

    Args:
        config: the transformers config.
        request: the `LoadRequest`.

    Raises:
        CheckpointError: the class has no plan, the sizes cannot be divided, there is only one process, or an argument
            excludes it.
    """
    if request.tp_plan is None and request.ep_plan is None:
        return None
    from transformers.distributed import DistributedConfig

    if given := [name for name in OTHERS if getattr(request, name) is not None]:
        raise CheckpointError(f"{given[0]}= and tp_plan= or ep_plan= exclude each other; leave {given[0]}= out.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        raise CheckpointError(
            "tp_plan= and ep_plan= divide a model among several processes, and this is the only one; start the script "
            "with torchrun --nproc-per-node N."
        )
    if request.tp_plan is None:
        raise CheckpointError(
            "ep_plan= divides the experts of a model that tp_plan= divides; pass tp_plan='auto', too."
        )
    for name in PLANS:
        if getattr(request, name) is not None:
            _check_plan(config, family, name, where)
    _check_sizes(config, processes, request.ep_plan is not None, where)
    plans = {name: value for name in PLANS if isinstance(value := getattr(request, name), dict)}
    return DistributedConfig(tp_size=processes, ep_size=processes if request.ep_plan is not None else None, **plans)


def _check_plan(config: "PreTrainedConfig", family: Family, name: str, where: str) -> None:
    """Refuse a class without the plan, and families whose weights or passes a plan does not cover."""
    if family.fused:
        reason = f"its files store {', '.join(family.fused)} in one piece, which transformers would divide as one"
    elif architecture_of(config.model_type).encoder:
        reason = "its encoder and decoder share weights"
    elif not getattr(config, f"base_model_{name}", None):
        reason = f"its class in transformers has no {name}"
    else:
        return
    raise CheckpointError(
        f"{where}: a {family.name} model ({config.model_type}) cannot be divided by {name}=: {reason}. Load it with "
        f"device_map='auto', which puts different layers on different devices."
    )


def _check_sizes(config: "PreTrainedConfig", processes: int, by_expert: bool, where: str) -> None:
    architecture = architecture_of(config.model_type)
    keys = ["num_attention_heads", "num_key_value_heads", architecture.config_mlp]
    keys += [architecture.experts.count] if by_expert and architecture.experts is not None else []
    for key in keys:
        size = getattr(config, key, None)
        if size is not None and size % processes:
            raise CheckpointError(
                f"{where}: {processes} processes do not divide {key} = {size}; start as many as divide it."
            )
