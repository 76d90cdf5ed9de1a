"""One process per GPU: each worker of a Ray cluster with simulated GPUs gets one of them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sinklens.evaluation import Condition, OnRay
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.units import Batch, Job
from sinklens.interventions import Intervention
from sinklens.tasks.word_problems import TinyGsm

SAMPLES = tuple(TinyGsm().samples(6))
JOB = Job("tiny-llada", {}, TinyGsm(), find_protocol("tiny-gsm"), 0)


@dataclass(frozen=True, kw_only=True)
class Noting(Intervention):
    """Changes nothing; writes down which GPUs its process may use."""

    folder: str

    def pairs(self, model, run):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        (Path(self.folder) / str(os.getpid())).write_text(f"{seen} {model.cfg.device.type}")
        return []


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray")
    ray.shutdown()
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray
    ray.shutdown()


def test_each_worker_sees_a_different_single_gpu(cluster, tmp_path):
    condition = Condition("noting", (Noting(folder=str(tmp_path)),))
    work = [Batch(condition, SAMPLES[at : at + 1]) for at in range(6)]
    done = {batch.samples[0].id: records for batch, records in OnRay().carry_out(JOB, work)}
    seen = [file.read_text().split() for file in tmp_path.iterdir()]
    assert sorted(gpu for gpu, _ in seen) == ["0", "1"]
    assert {device for _, device in seen} == {"cpu"}, "the GPUs are simulated, so the model is on the CPU"
    for records in (done[SAMPLES[0].id], alone := JOB.carry_out(work[0])):
        records[0].pop("seconds")
    assert done[SAMPLES[0].id] == alone
