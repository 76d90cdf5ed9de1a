"""`OnRay`: run batches on many workers with Ray, on one machine or on a cluster.

*Workers* (Ray actors that each load the job's model once) take one batch at a time, and their records arrive as they
finish. This process writes the ledger and needs neither a GPU nor memory for the model: a worker computes even the
model's identity. A worker that dies is replaced and its batch is started again. Nothing is written twice, because a
batch counts when its records arrive here, and they arrive once.

Known failure: a batch that kills every worker that takes it (usually by running out of memory) would be retried
forever. So the evaluation stops with an error when a batch has used up its tries.

Source: Ray, actors and fault tolerance, https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

from annotated_types import Ge

from sinklens.errors import SettingError, SinklensError, require
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.ledger import LedgerRecord
from sinklens.evaluation.units import Batch, Job
from sinklens.utils.arguments import Count, NonNegative, check_arguments, plainly_shown

# For a cluster started here: no usage statistics, and no warnings about settings chosen on purpose.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


@plainly_shown
@dataclass
class OnRay:
    """Many workers, for ``evaluate(engine=)``; they are connected inside a ``with`` block.

    If the caller is connected to a cluster, or `address` (or the environment variable RAY_ADDRESS) names one, that
    cluster is used and left running. Otherwise a cluster is started on this machine and stopped after the last batch.

    Attributes:
        workers: copies of the model; None for as many as the cluster can hold.
        gpus_per_worker: None for 1 if the cluster has GPUs, else 0. Load a model that needs more than 1 with
            ``load={"device_map": "auto"}``.
        cpus_per_worker: cores, and PyTorch threads, per worker.
        address: address of a running cluster, e.g. "auto" or "ray://head:10001".
        tries: how often a batch whose workers die is started before the evaluation stops.

    Raises:
        SettingError: a number is out of range.
    """

    workers: Count | None = None
    gpus_per_worker: NonNegative | None = None
    cpus_per_worker: Annotated[float | int, Ge(0.01)] = 1
    address: str | None = None
    tries: Count = 4
    _joined: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self)

    def __enter__(self) -> "OnRay":
        try:
            import ray
        except ImportError as error:
            raise SettingError(f"OnRay needs Ray ({error}): pip install 'sinklens[ray]'.") from error
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS") or "local"
            given: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address == "local":
                cpus = None if self.workers is None else max(1, math.ceil(self.workers * self.cpus_per_worker))
                given |= {"num_cpus": cpus, "include_dashboard": False}
            with patch.dict(os.environ, RAY_ENVIRONMENT | dict(os.environ)):
                ray.init(address=address, **given)
            self._joined.callback(ray.shutdown)
        return self

    def __exit__(self, *error: object) -> None:
        self._joined.close()

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """See `Job.identities`.

        Raises:
            SettingError: the model is neither a name nor a folder, or no machine of the cluster has the resources that
                a worker needs.
        """
        require(
            isinstance(job.source, str | Path),
            f"workers load the model themselves, so OnRay needs its name or folder; got a "
            f"{type(job.source).__name__}. To evaluate a loaded model, use engine=None, which runs in this "
            f"process.",
        )
        (worker,) = self._started(job, 1)
        return self._answer(worker.identities.remote(list(conditions)))

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterator[tuple[Batch, list[LedgerRecord]]]:
        """Yield batches with their records as they finish.

        Raises:
            SinklensError: the first error raised by a worker, or a batch has used up its tries.
        """
        import ray

        waiting, running = iter(work), dict[Any, tuple[Any, Batch]]()
        free = self._started(job, len(work)) if work else []
        while free or running:
            for worker, batch in zip(free, waiting, strict=False):
                running[worker.carry_out.remote(batch)] = worker, batch
            if not running:
                return
            (done,), _ = ray.wait(list(running), num_returns=1)
            worker, batch = running.pop(done)
            free = [worker]
            try:
                yield batch, self._answer(done)
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                raise SinklensError(
                    f"{batch.samples[0].id} to {batch.samples[-1].id} under {batch.condition.name!r} were started "
                    f"{self.tries} times, and each time the worker died (killed from outside, or out of memory). "
                    f"Finished samples are in the ledger; rerun with a smaller batch or fewer workers per machine."
                ) from error

    def _answer(self, pending: Any) -> Any:
        """The result of a worker, or its error without Ray's report."""
        import ray

        try:
            return ray.get(pending)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def _started(self, job: Job, most: int) -> list[Any]:
        """At most so many workers.

        Raises:
            SettingError: not even one fits the cluster.
        """
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        some = int(any(node.get("GPU", 0) >= 1 for node in nodes))
        gpus = some if self.gpus_per_worker is None else self.gpus_per_worker
        need = {"CPU": self.cpus_per_worker, "GPU": gpus}
        fitting = sum(min(int(node.get(kind, 0) // n) for kind, n in need.items() if n) for node in nodes)
        if fitting == 0:
            has = "; ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise SettingError(
                f"a worker needs {need['CPU']:g} cores and {gpus:g} GPUs on one machine, but no machine of the cluster "
                f"has them (available: {has}); give a smaller cpus_per_worker or gpus_per_worker."
            )
        if not gpus and not {"device", "device_map"} & set(job.load):
            job = replace(job, load=job.load | {"device": "cpu"})
        make = ray.remote(
            num_cpus=self.cpus_per_worker, num_gpus=gpus, max_restarts=-1, max_task_retries=self.tries - 1
        )(_Worker)  # fmt: skip
        given = {entry.name: getattr(job, entry.name) for entry in fields(Job)}
        return [
            make.remote(**given, cpus=self.cpus_per_worker) for _ in range(min(self.workers or fitting, fitting, most))
        ]


@dataclass(frozen=True)
class _Worker(Job):
    """A job in a process with as many threads as cores."""

    cpus: float = 1.0

    def __post_init__(self) -> None:
        import torch

        torch.set_num_threads(max(1, int(self.cpus)))
