"""Ray: the ledger equals the one written by a single process, whatever happens to the workers."""

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from sinklens.errors import PromptError, SettingError, SinklensError
from sinklens.evaluation import UNMASKED, Condition, OnRay, evaluate, masking
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.units import Batch, Job
from sinklens.interventions import Intervention
from sinklens.tasks.word_problems import TinyGsm

SAMPLES = tuple(TinyGsm().samples(8))
CONDITIONS = masking([0, 1])
JOB = Job("tiny-llada", {}, TinyGsm(), find_protocol("tiny-gsm"), 0)


@pytest.fixture
def ray():
    """Ray, with a cluster for this file that runs until its last test."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    return ray


@pytest.fixture(scope="module", autouse=True)
def _stopped():
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def reproducible(records):
    """Records without the fields that depend on timing and batching."""
    return [{name: value for name, value in record.items() if name not in ("seconds", "batch")} for record in records]


def workers():
    """Processes of this process's cluster that hold a model."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "_Worker" in "".join(process.cmdline())]


@pytest.mark.slow
def test_killed_workers_are_replaced_and_the_ledger_equals_that_of_one_process(tmp_path, capfd):
    ray = pytest.importorskip("ray")
    ray.shutdown()  # so that the engine starts a cluster
    killed, reports = [], []

    def report(condition, done, total):
        reports.append((condition.name, done))
        if done and not killed:  # the first records have arrived, the others have not
            killed.extend(workers())
            for process in killed:
                os.kill(process.pid, signal.SIGKILL)

    given = {"limit": 8, "batch_size": 2, "progress": report}
    runs = evaluate("tiny-llada", "tiny-gsm", CONDITIONS, tmp_path / "ray", engine=OnRay(workers=2), **given)
    output = capfd.readouterr()
    assert len(killed) == 2
    assert not ray.is_initialized(), "the cluster started for the evaluation is still running"
    assert "Running" not in output.out + output.err, "Ray printed progress bars"

    alone = evaluate("tiny-llada", "tiny-gsm", CONDITIONS, tmp_path / "alone", limit=8, batch_size=2)
    for run, reference in zip(runs, alone, strict=True):
        assert run.name == reference.name
        assert reproducible(run.records()) == reproducible(reference.records())
        assert len(run.done()) == 8
    assert [done for name, done in reports if name == "unmasked"] == [0, 2, 4, 6, 8]

    again = []
    evaluate("tiny-llada", "tiny-gsm", CONDITIONS, tmp_path / "ray", limit=8, progress=lambda *seen: again.append(seen))
    assert [done for _, done, _ in again] == [8, 8], "finished samples were evaluated again"


def test_batches_are_returned_and_a_workers_error_arrives_unchanged(ray):
    """A prompt that fits, followed by one that does not; the caller's cluster keeps running."""
    long = replace(SAMPLES[1], prompt=SAMPLES[1].prompt * 20)
    good, bad = Batch(CONDITIONS[1], SAMPLES[:1]), Batch(UNMASKED, (long,))
    done = OnRay(workers=1).carry_out(JOB, [good, bad])
    batch, records = next(done)
    assert batch is good
    assert reproducible(records) == reproducible(JOB.carry_out(good))
    with pytest.raises(PromptError, match=r"^sample tiny-gsm/1: .* positions, and a pass would need"):
        next(done)
    assert ray.is_initialized()


@dataclass(frozen=True, kw_only=True)
class Deadly(Intervention):
    """Kills its process."""

    def pairs(self, model, run):
        os.kill(os.getpid(), signal.SIGKILL)
        return []


@pytest.mark.slow
def test_a_batch_that_kills_every_worker_ends_the_evaluation(ray):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    work = [Batch(Condition("deadly", (Deadly(),)), SAMPLES[:2])]
    with pytest.raises(
        SinklensError,
        match=r"^tiny-gsm/0 to tiny-gsm/1 under 'deadly' were started 2 times, and each time the worker died",
    ):
        list(OnRay(workers=1, tries=2).carry_out(JOB, work))


@pytest.mark.parametrize(("use", "text"), [
    (
        lambda: OnRay(gpus_per_worker=3).identities(JOB, CONDITIONS),
        "needs 1 cores and 3 GPUs on one machine, .*available: 2 cores and 0 GPU",
    ),
    (lambda: list(OnRay(cpus_per_worker=64).carry_out(JOB, [Batch(UNMASKED, SAMPLES)])), "needs 64 cores and 0 GPUs"),
])  # fmt: skip
@pytest.mark.usefixtures("ray")
def test_a_worker_that_fits_no_machine_is_refused_immediately(use, text):
    with pytest.raises(SettingError, match=text):
        use()


@dataclass(frozen=True, kw_only=True)
class Noting(Intervention):
    """Changes nothing; writes down the threads and the device of its process."""

    folder: str

    def pairs(self, model, run):
        (Path(self.folder) / f"{os.getpid()} {torch.get_num_threads()} {model.cfg.device.type}").touch()
        return []


@pytest.mark.slow
def test_a_worker_uses_its_cores_and_no_gpu_if_it_has_none(ray, tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    condition = Condition("noting", (Noting(folder=str(tmp_path)),))
    list(OnRay(cpus_per_worker=2).carry_out(JOB, [Batch(condition, (sample,)) for sample in SAMPLES[:2]]))
    (seen,) = tmp_path.iterdir()  # two cores hold one such worker
    assert seen.name.split()[1:] == ["2", "cpu"]


def test_a_loaded_model_is_refused(tiny_llada, tmp_path):
    with pytest.raises(SettingError, match=r"OnRay needs its name or folder; got a Model. To evaluate a loaded model"):
        evaluate(tiny_llada, "tiny-gsm", CONDITIONS, tmp_path, limit=2, engine=OnRay())
    assert not list(Path(tmp_path).iterdir())


def test_without_ray_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"OnRay needs Ray .*: pip install 'sinklens\[ray\]'"):
        evaluate("tiny-llada", "tiny-gsm", CONDITIONS, tmp_path, limit=2, engine=OnRay())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, r"workers must be an integer of at least 1 or None; got 0"),
        ({"gpus_per_worker": -1}, r"gpus_per_worker must be a finite number of at least 0 or None; got -1"),
        ({"cpus_per_worker": 0}, r"cpus_per_worker must be a finite number of at least 0.01; got 0"),
        ({"tries": 0}, r"tries must be an integer of at least 1; got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(given, message):
    with pytest.raises(SettingError, match=message):
        OnRay(**given)
