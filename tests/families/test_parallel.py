"""A model that is divided among processes shows and computes what it does in one."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from building import random_hf
from layouts import ARCHITECTURES, arguments, public_config, write_family
from parallel_cases import CASES, observed
from transformers import GPT2Config

import sinklens
from sinklens.errors import CheckpointError
from sinklens.families import family_named, translate
from sinklens.families.dit import DitConfig
from sinklens.model.parallel import parallel_for

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every family of the cases."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in {family for family, _ in CASES.values()}:
        write_family(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def divided(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes observed, by case and process."""
    out = tmp_path_factory.mktemp("observed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, TESTS / "parallel_cases.py", checkpoints, out],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=(out / f"log-{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            process.wait(timeout=1200)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], (out / "log-0").read_text()[-3000:]
    return out


def _close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_two_processes_show_what_one_shows(checkpoints, divided, case):
    wanted = observed(sinklens.load(checkpoints / CASES[case][0], **arguments(CASES[case][0])))
    for rank in range(2):
        found = torch.load(divided / f"{case}-{rank}.pt")
        _close(found["logits"], wanted["logits"])
        assert found["points"].keys() == wanted["points"].keys()
        for name, value in wanted["points"].items():
            assert found["points"][name].shape == value.shape, name
            assert torch.allclose(found["points"][name], value, rtol=1e-4, atol=1e-4), name
        for name, value in wanted["edited"].items():
            _close(found["edited"][name], value)
            assert (value - wanted["logits"]).abs().max() > 1e-3, f"the edit of {name} has no effect"
        assert found["tokens"].tolist() == wanted["tokens"].tolist()
        torch.testing.assert_close(found["sinks"], wanted["sinks"], rtol=1e-4, atol=1e-4, equal_nan=True)
        assert torch.equal(found["W_Q"], wanted["W_Q"])
        assert torch.equal(found["W_O"], wanted["W_O"])
        assert found["fingerprint"] == wanted["fingerprint"]


@pytest.mark.extended
def test_recorded_sinks_are_gathered_by_heads_and_patterns_are_not(divided):
    for case in ("llada", "llama"):
        shapes = torch.load(divided / f"{case}-0.pt")["gathered"]
        assert shapes
        assert {len(shape) for shape in shapes} == {3}  # [batch, head, key]
        assert {shape[1] for shape in shapes} == {3}  # half of the heads


# Refusals


def _asked(**given: Any) -> Any:
    return SimpleNamespace(**dict.fromkeys(("device", "device_map", "quantization", "tp_plan", "ep_plan")) | given)


def _config(family: str, **settings: Any) -> Any:
    record = family_named(family)
    return translate(public_config(family, random_hf(ARCHITECTURES[family], **settings)), record, "here"), record


def test_one_process_cannot_divide_a_model(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(CheckpointError, match="this is the only one; start the script with torchrun"):
        parallel_for(*_config("llada"), _asked(tp_plan="auto"), "here")


@pytest.mark.parametrize("name", ["device", "device_map", "quantization"])
def test_what_places_the_weights_otherwise_is_refused_beside_a_plan(name):
    with pytest.raises(CheckpointError, match=f"{name}= and tp_plan= or ep_plan= exclude each other"):
        parallel_for(*_config("llada"), _asked(tp_plan="auto", **{name: "cpu"}), "here")


def test_sizes_that_the_processes_do_not_divide_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CheckpointError, match="4 processes do not divide num_attention_heads = 6"):
        parallel_for(*_config("llada"), _asked(tp_plan="auto"), "here")


@pytest.mark.parametrize(
    ("family", "plan", "reason"),
    [("llada2", "tp_plan", r"store query_key_value.weight in one piece"), ("llada", "ep_plan", "has no ep_plan")],
)
def test_a_family_that_cannot_be_divided_is_named_with_the_reason(monkeypatch, family, plan, reason):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match=f"a {family} model .* cannot be divided by {plan}=: .*{reason}"):
        parallel_for(*_config(family), _asked(**{"tp_plan": "auto", plan: "auto"}), "here")


def test_experts_are_divided_with_the_rest(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="pass tp_plan='auto', too"):
        parallel_for(*_config("llada-moe"), _asked(ep_plan="auto"), "here")


@pytest.mark.parametrize("architecture", ["gpt2", "adaln_dit"])
def test_classes_without_a_plan_are_refused(monkeypatch, architecture):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config, family = (GPT2Config(), "gpt2") if architecture == "gpt2" else (DitConfig(), "gidd")
    with pytest.raises(CheckpointError, match=f"{family} model .* cannot be divided"):
        parallel_for(config, family_named(family), _asked(tp_plan="auto"), "here")
