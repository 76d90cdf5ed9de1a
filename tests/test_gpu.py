"""The check of a device: what its parts share is right, planted faults are detected, and outcomes become findings."""

import pytest
import torch
from building import random_ids, random_model, shared_model
from gpu import agreement, samples
from gpu.agreement import near, same_tokens
from gpu.kernels import Case, compare_kernels
from gpu.report import Finding, Report, findings_of

from benchmarks.plain import plain_loop, random_llada, reference_loop, twin
from sinklens.model import load

GIVEN = {"gen_length": 8, "block_length": 8, "steps": 8}


def rounded_differently(amount):
    """The shared model with noise of size `amount` on its unembedding, as if a device had added in another order."""
    model = random_model()
    noise = torch.randn(model.tree.W_U.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.tree.W_U.add_(amount * noise)
    return model


WANTED = torch.tensor([0.0, 200.0, -torch.inf, torch.nan])


@pytest.mark.parametrize(("found", "text"), [
    (WANTED + 0.1, r"differs by 0.0005; at most 0.0001 is allowed"), (torch.zeros(4), "hook_z differs by nan"),
    (WANTED[:3], r"shape \[3\] instead of \[4\]"),
])  # fmt: skip
def test_a_difference_is_relative_to_the_largest_number(found, text):
    assert near(WANTED + 0.01, WANTED, 1e-4).startswith("differs by 5e-05")
    with pytest.raises(AssertionError, match=text):
        near(found, WANTED, 1e-4, "hook_z")


def test_the_same_run_passes():
    assert same_tokens(shared_model(), random_model(), random_ids(length=9), GIVEN) == "8 steps, all canvases the same"


def test_a_device_with_different_logits_fails():
    with pytest.raises(
        AssertionError, match=r"step 0: logits differ by .* on the same canvas, which is more than rounding"
    ):
        same_tokens(shared_model(), rounded_differently(0.3), random_ids(length=9), GIVEN)


def test_a_decision_within_the_noise_is_a_tie(monkeypatch):
    monkeypatch.setattr(agreement, "NOISE", 1.0)
    result = same_tokens(shared_model(), rounded_differently(0.1), random_ids(length=9), GIVEN)
    assert result.startswith("the same until step ")
    assert "where decisions are tied" in result


def test_a_different_decision_without_noise_fails(monkeypatch):
    """One sampler decides differently although the logits are the same."""
    original, plain = agreement._run, random_model()

    def remasking_randomly(model, prompt, **given):
        return original(model, prompt, **given, **({"remasking": "random"} if model is plain else {}))

    monkeypatch.setattr(agreement, "_run", remasking_randomly)
    with pytest.raises(AssertionError, match=r"decisions .* apart differ, where logits differ by 0"):
        same_tokens(shared_model(), plain, random_ids(length=9), GIVEN)


def test_a_decision_unlike_the_plain_loops_is_a_tie_or_a_fault(monkeypatch):
    plain, ids = random_llada(64, 2, 4, 97), samples.random_ids(2, 20, 90) + 2
    assert str(agreement.decisions(load(twin(plain)), plain, ids, 4)).startswith("0 of 8 decisions differ")
    other = twin(plain)
    noise = torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight + 0.02 * noise)
    found = agreement.decisions(load(other), plain, ids, 4)
    assert str(found).startswith(
        f"{len(found.differing)} of 8 decisions differ on the same canvases, 0 of them by ties"
    )
    monkeypatch.setattr(agreement, "TIED", 1e9)
    assert f", {len(found.differing)} of them by ties; the first, in step 0, row " in str(found)


CPU = torch.device("cpu")


def test_a_wrong_kernel_is_detected(monkeypatch):
    kernels = pytest.importorskip(
        "sinklens.hooks.attention.column_sums_triton", reason="Triton has no wheel for this system"
    )
    original, case = kernels.column_sums, Case(torch.float32, 32, "key")
    assert "differs by" in compare_kernels(case, kernels, CPU)
    monkeypatch.setattr(kernels, "column_sums", lambda *given: original(*given) * 1.01)
    with pytest.raises(AssertionError, match=r"differs by 0\.01; at most 0.0001 is allowed"):
        compare_kernels(case, kernels, CPU)


def test_a_twin_shares_its_weights_and_gives_the_same_logits():
    model, ids = random_llada(64, 2, 4, 97), samples.random_ids(1, 40)
    for attention in ("sdpa", "eager"):
        other = twin(model, attention)
        assert other.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
        with torch.no_grad():
            torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(plain_loop(model, ids, 4), reference_loop(model, ids, 4))


def outcome(status, longrepr=None, when="call", **properties):
    return pytest.TestReport(
        "test_runs.py::test_twice", ("test_runs.py", 1, "test_twice"), {}, status, longrepr, when,
        user_properties=list(properties.items()), duration=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(("report", "wanted"), [
    (outcome("passed", what="twice", detail="8 steps"), Finding("runs", "twice", "passed", "8 steps", seconds=0.5)),
    (
        outcome("passed", what="twice", detail="5 pairs", value=1.5, aim=1.02),
        Finding("runs", "twice", "measured", "5 pairs", 1.5, 1.02, 0.5),
    ),
    (
        outcome("skipped", ("test_runs.py", 1, "Skipped: it takes two GPUs"), "setup", what="twice"),
        Finding("runs", "twice", "not checked", "it takes two GPUs", seconds=0.5),
    ),
    (
        outcome("failed", "worker 'gw0' crashed", "???"),
        Finding("runs", "test_twice", "failed", "worker 'gw0' crashed", seconds=0.5),
    ),
    (
        outcome("failed", "the device is gone", "setup", what="twice"),
        Finding("runs", "twice", "failed", "the device is gone", seconds=0.5),
    ),
])  # fmt: skip
def test_an_outcome_is_one_finding(report, wanted):
    assert list(findings_of(report)) == [wanted]


@pytest.mark.parametrize(("parts", "status"), [(["runs"], 1), (["speed"], 0), (["speed", "runs"], 1), ([], 1)])
def test_only_a_failure_about_correctness_fails_the_check(tmp_path, parts, status):
    report = Report(tmp_path / "out.json", "cpu", [Finding(part, "a claim", "failed") for part in parts])
    assert report.exit_status(1) == status
    assert report.exit_status(2) == 2, "an interrupted check"
