"""`OnRay`: run batches on many workers with Ray Data, on one machine or on a cluster.

Batches are the rows of a dataset. A pool of *workers* (Ray actors that each load the job's model once) maps them to
records, which stream back as they finish. This process writes the ledger and needs neither a GPU nor memory for the
model: a worker computes even the model's identity. A worker that dies is replaced and its batch is started again.
Nothing is written twice, because a batch counts when its records arrive here, and they arrive once.

Known failure: a batch that kills every worker that takes it (usually by running out of memory) would be retried
forever. The starts of each batch are therefore counted, and the evaluation stops with an error when a batch has used
up its tries.

Source: Ray Data, https://docs.ray.io/en/latest/data/data.html.
"""

import logging
import math
import os
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sinklens.errors import SettingError, SinklensError
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.ledger import LedgerRecord
from sinklens.evaluation.runner import InProcess, Job
from sinklens.evaluation.units import Batch

# For a cluster started here: no usage statistics, and no warnings about settings chosen on purpose.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


class OnRay:
    """An `Engine` with many workers.

    If the caller is connected to a cluster, or `address` (or the environment variable RAY_ADDRESS) names one, that
    cluster is used and left running. Otherwise a cluster is started on this machine and stopped after the last batch.

    Args:
        workers: copies of the model; None for as many as the cluster can hold.
        gpus_per_worker: None for 1 if the cluster has GPUs, else 0. Load a model that needs more than 1 with
            ``load={"device_map": "auto"}``.
        cpus_per_worker: cores, and PyTorch threads, per worker.
        address: address of a running cluster, e.g. "auto" or "ray://head:10001".
        tries: how often a batch whose workers die is started before the evaluation stops.

    Raises:
        SettingError: a number is out of range.
    """

    def __init__(
        self,
        workers: int | None = None,
        gpus_per_worker: float | int | None = None,
        cpus_per_worker: float | int = 1,
        address: str | None = None,
        tries: int = 4,
    ) -> None:
        for name, value, fits in (
            ("workers", workers, workers is None or workers >= 1),
            ("gpus_per_worker", gpus_per_worker, gpus_per_worker is None or gpus_per_worker >= 0),
            ("cpus_per_worker", cpus_per_worker, cpus_per_worker > 0),
            ("tries", tries, tries >= 1),
        ):
            if not fits:
                least = {"gpus_per_worker": "at least 0", "cpus_per_worker": "more than 0"}.get(name, "at least 1")
                raise SettingError(f"{name} must be {least}; got {value}.")
        self.workers, self.gpus_per_worker, self.cpus_per_worker = workers, gpus_per_worker, cpus_per_worker
        self.address, self.tries = address, tries
        self._close: weakref.finalize | None = None

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """See `Engine`.

        Raises:
            SettingError: the model is neither a name nor a folder, Ray is not installed, or no machine of the cluster
                has the resources that a worker needs.
        """
        if not isinstance(job.source, str | Path):
            raise SettingError(
                f"workers load the model themselves, so OnRay needs its name or folder; got a "
                f"{type(job.source).__name__}. To evaluate a loaded model, use engine=None, which runs in this "
                f"process."
            )
        ray = self._connect()
        try:
            need, _ = self._shares()
            return _or_raise(ray.get(ray.remote(**need)(_identities).remote(job, list(conditions), need)))
        except BaseException:
            self.close()
            raise

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterator[tuple[Batch, list[LedgerRecord]]]:
        """See `Engine`; yields batches as they finish.

        Raises:
            SinklensError: the first error raised by a worker, or a batch has used up its tries.
        """
        ray = self._connect()
        logger = logging.getLogger("ray.data")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            need, fitting = self._shares()
            count = min(self.workers or fitting, len(work))
            tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tally).remote()
            rows = [{"place": place, "work": ray.cloudpickle.dumps(batch)} for place, batch in enumerate(work)]
            dataset = ray.data.from_items(
                rows, override_num_blocks=len(rows)
            )  # one task each: a dead worker costs one batch
            dataset.context.enable_progress_bars = False
            done = dataset.map_batches(
                _Worker,
                fn_constructor_args=(job, need, tally, self.tries),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
                **need,
            )
            for rows in done.iter_batches(
                batch_size=None, prefetch_batches=0
            ):  # finished batches do not wait for the next
                for place, outcome in zip(rows["place"], rows["outcome"], strict=True):
                    yield work[int(place)], _or_raise(pickle.loads(outcome))
        finally:
            logger.setLevel(level)
            self.close()

    def close(self) -> None:
        """Stop the cluster if it was started here, or disconnect from a joined one; does nothing otherwise."""
        if self._close is not None:
            self._close()
            self._close = None

    def _connect(self) -> Any:
        """Return the module ``ray``, connected to a cluster."""
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise SettingError(f"OnRay needs Ray Data ({error}): pip install 'sinklens[ray]'.") from error
        if ray.is_initialized():
            return ray
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, **quiet)
        else:
            cpus = None if self.workers is None else max(1, math.ceil(self.workers * self.cpus_per_worker))
            with patch.dict(os.environ, RAY_ENVIRONMENT | dict(os.environ)):
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        self._close = weakref.finalize(self, ray.shutdown)  # also runs if no batch was missing
        return ray

    def _shares(self) -> tuple[dict[str, float | int], int]:
        """The resources that each worker reserves, and how many such workers fit the cluster.

        Raises:
            SettingError: not even one fits.
        """
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = self.gpus_per_worker
        if gpus is None:
            gpus = int(any(node.get("GPU", 0) >= 1 for node in nodes))
        need = {"CPU": self.cpus_per_worker, "GPU": gpus}
        fitting = sum(min(int(node.get(kind, 0) // n) for kind, n in need.items() if n) for node in nodes)
        if fitting == 0:
            has = "; ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise SettingError(
                f"a worker needs {need['CPU']:g} cores and {gpus:g} GPUs on one machine, but no machine of the cluster "
                f"has them (available: {has}); give a smaller cpus_per_worker or gpus_per_worker."
            )
        return {"num_cpus": self.cpus_per_worker, "num_gpus": gpus}, fitting


class _Tally:
    """Counts how often each batch was started."""

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}

    def begin(self, place: int) -> int:
        self.starts[place] = self.starts.get(place, 0) + 1
        return self.starts[place]


class _Worker:
    """Holds the model and runs one batch at a time; a callable class in Ray Data's terms."""

    def __init__(self, job: Job, need: Mapping[str, float | int], tally: Any, tries: int) -> None:
        self.job, self.need, self.tally, self.tries = job, need, tally, tries
        self.engine = InProcess()

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[Any]]:
        import ray

        place = int(rows["place"][0])
        batch: Batch = ray.cloudpickle.loads(rows["work"][0])
        outcome: list[LedgerRecord] | SinklensError
        try:
            self._check_tries(batch, ray.get(self.tally.begin.remote(place)))
            outcome = next(iter(self.engine.carry_out(_job_here(self.job, self.need), [batch])))[1]
        except SinklensError as error:  # returned, not raised: Ray would wrap it in its own error with a long traceback
            outcome = error
        return {"place": [place], "outcome": [pickle.dumps(outcome)]}

    def _check_tries(self, batch: Batch, starts: int) -> None:
        if starts > self.tries:
            raise SinklensError(
                f"{batch.samples[0].id} to {batch.samples[-1].id} under {batch.condition.name!r} were started "
                f"{self.tries} times, and each time the worker died (killed from outside, or out of memory). Finished "
                f"samples are in the ledger; rerun with a smaller batch or fewer workers per machine."
            )


def _identities(
    job: Job, conditions: Sequence[Condition], need: Mapping[str, float | int]
) -> list[dict[str, Any]] | SinklensError:
    try:
        return InProcess().identities(_job_here(job, need), conditions)
    except SinklensError as error:
        return error


def _job_here(job: Job, need: Mapping[str, float | int]) -> Job:
    """`job` for this worker: as many threads as cores, and on the CPU if it has no GPU."""
    import torch

    torch.set_num_threads(max(1, int(need["num_cpus"])))
    if need["num_gpus"] or {"device", "device_map"} & set(job.load):
        return job
    return Job(job.source, job.load | {"device": "cpu"}, job.task, job.protocol, job.seed)


def _or_raise(outcome: Any) -> Any:
    if isinstance(outcome, SinklensError):
        raise outcome
    return outcome
