"""Claims become findings, and a difference above its tolerance fails."""

import time

import pytest
import torch

from sinklens.devices.findings import Claim, Finding, Measurement, NotChecked, carry_out, closing, near


def fail(error):
    def check():
        raise error

    return check


CLAIMS = [
    Claim("holds", lambda: "within 1e-6"),
    Claim("differs", fail(AssertionError("differs by 1"))),
    Claim("breaks", fail(RuntimeError("CUDA error:\n an illegal memory access"))),
    Claim("needs more", fail(NotChecked("it takes two GPUs"))),
    Claim("ratio", lambda: Measurement(1.5, 1.02, "5 pairs")),
]


def test_each_claim_is_checked_whatever_the_outcome_of_the_previous_one():
    found = list(carry_out("runs", CLAIMS, time.monotonic() + 60))
    assert [(finding.what, finding.status, finding.detail) for finding in found] == [
        ("holds", "passed", "within 1e-6"),
        ("differs", "failed", "differs by 1"),
        ("breaks", "failed", "RuntimeError: CUDA error: an illegal memory access"),
        ("needs more", "not checked", "it takes two GPUs"),
        ("ratio", "measured", "5 pairs"),
    ]
    assert (found[-1].value, found[-1].aim) == (1.5, 1.02)


def test_claims_without_time_left_are_listed_as_not_checked():
    found = list(carry_out("runs", CLAIMS, time.monotonic() - 1))
    assert [finding.status for finding in found] == ["not checked"] * len(CLAIMS)
    assert {finding.detail for finding in found} == {"the time for this part was over"}


def test_a_difference_is_relative_to_the_largest_number():
    wanted = torch.tensor([0.0, 200.0, -torch.inf, torch.nan])
    assert near(wanted + 0.01, wanted, 1e-4).startswith("differs by 5e-05")
    with pytest.raises(AssertionError, match=r"differs by 0.0005; at most 0.0001 is allowed"):
        near(wanted + 0.1, wanted, 1e-4)
    with pytest.raises(AssertionError, match=r"differs by nan"):
        near(torch.zeros(4), wanted, 1e-4)
    with pytest.raises(AssertionError, match=r"shape \[3\] instead of \[4\]"):
        near(wanted[:3], wanted, 1e-4)


def test_a_nan_in_place_of_a_number_fails():
    with pytest.raises(AssertionError, match="differs by nan"):
        near(torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 1.0]), 1e-4)


def test_the_closing_table_counts_findings_and_lists_the_noteworthy_ones():
    findings = [
        Finding("runs", "the tokens", "passed"), Finding("runs", "twice", "failed", "canvases differ"),
        Finding("speed", "ratio", "measured", "5 pairs", 1.5, 1.02),
        Finding("runs", "two GPUs", "not checked", "there is one"),
    ]  # fmt: skip
    lines = closing(findings, {"runs": 3.2, "speed": 60.0}, {"runs": "complete runs", "speed": "ratios"})
    assert lines[1].split() == ["runs", "1", "1", "1", "0", "3", "s", "complete", "runs"]
    assert lines[2].split() == ["speed", "0", "0", "0", "1", "60", "s", "ratios"]
    assert "  runs: twice: canvases differ" in lines
    assert "  runs: two GPUs: there is one" in lines
    assert "  ratio: 1.500 (aim: at most 1.02, missed); 5 pairs" in lines
