"""The check runs on a CPU, and keeps all findings when a test crashes or hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).resolve().parent / "gpu"
CHECK = [sys.executable, "-m", "pytest", "-c", str(GPU / "pytest.ini"), str(GPU), "--device", "cpu"]
TIMEOUT = ["-o", "faulthandler_timeout=15"]
PLANTED = """
import time
import pytest

def broken(device):
    raise RuntimeError("an illegal memory access was encountered")

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    name = pyfuncitem.name.removeprefix("test_")
    if name == "sums":
        time.sleep(600)
    if name == "block":
        for plugin in pyfuncitem.config.pluginmanager.get_plugins():
            if hasattr(plugin, "settle"):
                plugin.settle = broken
    if name in ("block", "masked"):
        raise ValueError("planted")
"""


def run(command, folder, **environment):
    """The finished process, what it wrote, and the findings by what was tested."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )
    content = json.loads((folder / "sinklens-check.json").read_text())
    return done, content, {finding["what"]: finding for finding in content["findings"]}


def test_on_a_cpu_the_check_runs_and_reports_what_it_could_not_check(tmp_path):
    """Three of the parts, by the command that a user types."""
    done, content, findings = run([*CHECK, "-m", "environment or hooking or spreading"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (content["device"], list(content["seconds"])) == ("cpu", ["environment", "hooking", "spreading"])
    assert list(content["findings"][0]) == ["part", "what", "status", "detail", "value", "aim", "seconds"]
    assert findings["device"] | {"seconds": 0.0} == {
        "part": "environment", "what": "device", "status": "noted", "detail": "cpu", "value": None, "aim": None,
        "seconds": 0.0,
    }  # fmt: skip
    assert findings["every hook point of a run shows the CPU's values"]["status"] == "passed"
    assert findings["Triton compiles for this device"]["status"] == "not checked"
    assert "failed" not in {finding["status"] for finding in content["findings"]}
    assert "Not checked, and why:" in done.stdout
    assert "it takes two GPUs; there are none" in done.stdout


UNINSTALLED = """
import importlib.metadata

original = importlib.metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name == "sinklens":
        raise importlib.metadata.PackageNotFoundError(name)
    return original(cls, name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
"""


def test_the_figures_are_measured_first_in_a_copy_that_is_not_installed(tmp_path):
    """A rehearsal with small shapes; the other stage has none of them."""
    (tmp_path / "uninstalled.py").write_text(UNINSTALLED)
    figures = [*CHECK, "-p", "uninstalled", "--stage"]
    done, content, findings = run([*figures, "figures"], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = [finding["status"] for finding in content["findings"]]
    assert statuses == ["measured", "measured", "measured", "not checked", "measured", "passed"]
    assert "0 of 2 decisions differ" in findings[DECISIONS]["detail"]
    assert done.stdout.count("nothing watched ÷ plain transformers SDPA") == 2, "as it ends, and in the table"
    done, content, _ = run([*figures, "figures", "--only", DECISIONS], tmp_path, PYTHONPATH=str(tmp_path))
    assert [finding["what"] for finding in content["findings"]] == [DECISIONS]
    (tmp_path / "sinklens-check.json").write_text('{"findings": []}')
    assert run([*figures, "checks", "--only", DECISIONS], tmp_path, PYTHONPATH=str(tmp_path))[0].returncode == 0


DECISIONS = "steps that the plain loop decides otherwise on the same canvas (S = 128, batch 1)"


def test_a_hang_and_a_broken_device_each_cost_one_test(tmp_path):
    (tmp_path / "planted_faults.py").write_text(PLANTED)
    chosen = ["-m", "hooking", "-k", "sums or block or masked or guidance"]
    done, content, findings = run(
        [*CHECK, "-p", "planted_faults", *TIMEOUT, *chosen], tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted((finding["what"], finding["status"]) for finding in content["findings"]) == [
        ("an edit in a trace block acts like the same edit by a hook", "failed"),
        ("guidance gives the CPU's logits", "passed"),
        ("keys that MaskSinks(5) masked have a score of exactly 0", "failed"), ("test_block", "failed"),
        ("test_sums", "failed"),
    ]  # fmt: skip
    assert "crashed while running" in findings["test_sums"]["detail"]
    assert findings["keys that MaskSinks(5) masked have a score of exactly 0"]["detail"] == "ValueError: planted"
