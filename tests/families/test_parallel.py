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


AUTO = {"tp_plan": "auto"}
REFUSED: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("llada", None, AUTO, "this is the only one; start the script with torchrun"),
    *(("llada", "2", AUTO | {name: "cpu"}, f"{name}= and tp_plan= or ep_plan= exclude each other")
      for name in ("device", "device_map", "quantization")),
    ("llada", "4", AUTO, "4 processes do not divide num_attention_heads = 6"),
    ("llada2", "2", AUTO, r"a llada2 model .* cannot be divided by tp_plan=: .*store query_key_value.weight in one"),
    ("llada", "2", AUTO | {"ep_plan": "auto"}, "a llada model .* cannot be divided by ep_plan=: .*has no ep_plan"),
    ("llada-moe", "2", {"ep_plan": "auto"}, "pass tp_plan='auto', too"),
    ("gpt2", "2", AUTO, "gpt2 model .* cannot be divided"),
    ("gidd", "2", AUTO, "gidd model .* cannot be divided"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "processes", "given", "message"), REFUSED)
def test_what_cannot_be_divided_is_refused(monkeypatch, family, processes, given, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("WORLD_SIZE", processes)
    record, own = family_named(family), {"gpt2": GPT2Config, "gidd": DitConfig}
    if family in own:
        config = own[family]()
    else:
        config = translate(public_config(family, random_hf(ARCHITECTURES[family])), record, "here")
    asked = SimpleNamespace(**dict.fromkeys(("device", "device_map", "quantization", "tp_plan", "ep_plan")) | given)
    with pytest.raises(CheckpointError, match=message):
        parallel_for(config, record, asked, "here")
