"""Continuations: they resume exactly, their adapters are checkpoints, and their measures are those of sinklens."""

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from building import random_hf
from planting import planted
from safetensors.torch import load_file, save_file

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.sinks import EpsilonOverMean
from training import continued
from training.continued import MASK_ID, Continuation, Texts, batch_of, train
from training.run_files import read_records
from training.sinks import SHARES, Windows

ARMS = ("masked", "causal")
MINI = Continuation("masked", seed=3, tokens=6 * 64, rows=4, length=16, rank=4, peak=2e-2, warmup=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random Llama as files."""
    folder, hf = tmp_path_factory.mktemp("base"), random_hf(causal=True, tie_word_embeddings=True, head_dim=8)
    weights = {name: value.contiguous() for name, value in hf.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
             "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    config = {"model_type": "llama", "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
    config |= {name: getattr(hf.config, name) for name in names} | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Random tokens besides the mask and the end, and rows of 8."""
    file, rng = tmp_path_factory.mktemp("texts") / "tokens.npz", np.random.default_rng(0)
    shapes = {"train": 400, "held": 300, "rows": (30, 8)}
    arrays = {name: rng.integers(17, 61, shape).astype(np.uint16) for name, shape in shapes.items()}
    np.savez(file, **arrays, starts=rng.integers(0, 6, 30).astype(np.uint16))
    return Texts.read(file)


@pytest.fixture(scope="module")
def finished(base, texts, tmp_path_factory):
    """The folder of each arm's run, which also keeps the adapter of its start."""
    folder, small = tmp_path_factory.mktemp("runs"), {"windows": (6, 24), "milestones": (0.0, 0.0002), "keep": (0.0,)}
    assert all(train(replace(MINI, arm=arm), base, texts, folder / arm, **small) for arm in ARMS)
    return folder


def opened(base, adapter, folder):
    """The checkpoint that a base and an adapter make together."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    return sinklens.load(shutil.copytree(adapter, folder, dirs_exist_ok=True))


@pytest.mark.parametrize("arm", ARMS)
def test_a_killed_run_resumes_exactly(arm, base, texts, finished, tmp_path, monkeypatch):
    run, small = replace(MINI, arm=arm), {"windows": (6, 24), "milestones": (0.0, 0.0002)}
    with monkeypatch.context() as patch:
        patch.setattr(continued, "SAVE_EVERY", 0)
        patch.setattr(continued, "batch_of", lambda *given: 1 / (4 - given[2]) and batch_of(*given))
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            train(run, base, texts, tmp_path, **small)
    assert not train(run, base, texts, tmp_path, **small, until=0.0)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 4
    assert train(run, base, texts, tmp_path, **small)
    for name in ("measures.jsonl", "adapter/adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (finished / arm / name).read_bytes()
    assert [record["step"] for record in read_records(tmp_path / "measures.jsonl")] == [0, 3, 6]
    with pytest.raises(SettingError, match=r"state.pt belongs to another run: .*'seed': 3.* not .*'seed': 4"):
        train(replace(run, seed=4), base, texts, tmp_path)


@pytest.mark.filterwarnings("ignore:.* contain no mask token")
@pytest.mark.parametrize("arm", ARMS)
def test_measures_are_those_of_sinklens(arm, base, texts, finished, tmp_path):
    """At the start of a run: first position, strongest keys, sinks, their motion and the loss."""
    model, windows = opened(base, finished / arm / "adapter-0", tmp_path), Windows.drawn(texts.held, 6, 24)
    later = torch.arange(24) > windows.replaced[:, None]

    def read(ids):
        with torch.no_grad():
            logits, cache = model.run_with_cache(ids)
        patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(3)], dim=1)
        return patterns.sum(dim=-2), (patterns * later[:, None, None, :, None]).sum(dim=-2), logits

    def moved(one, other):
        return (one.argmax(dim=-1) != other.argmax(dim=-1)).double().mean(dim=(1, 2))

    head = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    others = torch.arange(61) != MASK_ID  # in training, the head has the base's row for the mask; in the checkpoint not
    row = head[MASK_ID] @ torch.linalg.pinv(head[others])
    (record, *_) = read_records(finished / arm / "measures.jsonl")
    assert [one["share"] for one in record["shares"]] == (list(SHARES) if arm == "masked" else [0])
    for found in record["shares"]:
        hidden = windows.order < max(1, round(found["share"] * 23)) if found["share"] else torch.zeros(6, 24) > 0
        tokens = windows.ids.masked_fill(hidden, MASK_ID)
        sums, sums_later, logits = read(tokens)
        logits[..., MASK_ID] = logits[..., others] @ row
        nats = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows.ids[:, 1:], reduction="none")
        nats[~hidden[:, 1:] & bool(found["share"])] = torch.nan
        sinks = torch.tensor(EpsilonOverMean().detect(planted(sums[:, None].numpy())).to_numpy()[:, 0])
        edited = tokens.scatter(1, windows.replaced[:, None], windows.other[:, None])
        first = windows.order.argmin(dim=1, keepdim=True)
        revealed = tokens.scatter(1, first, windows.ids.gather(1, first))
        expected = {
            "first": sums[..., 0].mean(dim=(1, 2)) / 24,
            "first_strongest": (sums.argmax(dim=-1) == 0).double().mean(dim=(1, 2)),
            "sink_heads": sinks.any(dim=-1).double().mean(dim=(1, 2)),
            "sink_mass": (sums * sinks).sum(dim=-1).mean(dim=(1, 2)) / 24,
            "loss": nats.nanmean(dim=1),
            "replaced": moved(sums_later, read(edited)[1]),
        }
        expected |= {"revealed": moved(sums, read(revealed)[0])} if arm == "masked" else {}
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=2e-5, err_msg=name)
        assert sinks.any()


@pytest.mark.parametrize("arm", ARMS)
def test_the_adapter_is_what_was_trained(arm, base, texts, finished, tmp_path):
    """Up to the rounding of its factors, a small part of what training has changed."""
    run, ids = replace(MINI, arm=arm), texts.held[:60].view(3, 20).masked_fill(torch.arange(20) % 3 == 2, MASK_ID)
    net = continued.LowRankLlama(base, rank=4, seed=3, mask_id=MASK_ID if arm == "masked" else None)
    before = opened(base, finished / arm / "adapter-0", tmp_path / "before")(ids)
    continued._resume(finished / arm / "state.pt", run, net, torch.optim.AdamW(net.trained.values(), betas=(0.9, 0.98)))
    with torch.no_grad():
        trained = net.logits(net(ids)[0])
    model = opened(base, finished / arm / "adapter", tmp_path / "after")
    assert (model.causal, model.mask_token_id) == ((False, MASK_ID) if arm == "masked" else (True, None))
    others = torch.arange(61) != MASK_ID
    error, change = (model(ids) - trained)[..., others].norm(), (before - trained)[..., others].norm()
    assert 0 < error < 0.1 * change


def test_batches_are_those_of_the_recipe(texts):
    """Both arms have the same rows; prompts are not predicted; masks follow the share of their row."""
    known = {tuple(row): max(1, start) for row, start in zip(texts.rows.tolist(), texts.starts.tolist(), strict=True)}
    tasks = 0
    for step in range(60):
        masked, causal = (batch_of(texts, replace(MINI, arm=arm, rows=64), step) for arm in ARMS)
        ids, hidden = causal.tokens, masked.tokens == MASK_ID
        assert torch.equal(masked.tokens, ids.masked_fill(hidden, MASK_ID))
        assert torch.equal(masked.places, hidden.flatten().nonzero()[:, 0] - 1)
        assert torch.equal(masked.wanted, ids[hidden])
        tasks += ids.shape[1] == 8
        starts = torch.tensor([known[tuple(row)] if len(row) == 8 else 1 for row in ids.tolist()])
        eligible = torch.arange(ids.shape[1]) >= starts[:, None]
        assert torch.equal(causal.places, eligible.flatten().nonzero()[:, 0] - 1)
        assert not (hidden & ~eligible).any()
        halves = [hidden[half].sum() / eligible[half].sum() for half in torch.arange(len(ids)).chunk(2)]
        torch.testing.assert_close(torch.stack(halves), torch.tensor([0.25, 0.75]), atol=0.12, rtol=0)
        torch.testing.assert_close(
            torch.stack([causal.weight.sum(), masked.weight.sum()]), torch.ones(2), atol=0.8, rtol=0
        )
    assert 15 <= tasks <= 33


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"run": replace(MINI, rows=3, length=9)}, SettingError, "a batch of 27 tokens does not divide into rows of 8"),
        ({"windows": (4, 300)}, SettingError, "the held-out text has 300 tokens; got 4 windows of 300"),
        ({"base": Path("/nowhere")}, CheckpointError, "/nowhere"),
    ],
)
def test_a_run_that_cannot_begin_says_why(change, error, text, base, texts, tmp_path):
    with pytest.raises(error, match=text):
        train(**{"run": MINI, "base": base, "texts": texts, "out": tmp_path} | change)


def test_the_table_has_the_mean_of_each_measure_over_the_windows(finished, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    script = importlib.import_module("sink_curve")
    table = script.table_of(finished).set_index(["arm", "tokens", "share", "measure"])
    record = read_records(finished / "masked" / "measures.jsonl")[1]
    for found in record["shares"]:
        row = table.loc["masked", record["tokens"], found["share"], "sink_mass"]
        np.testing.assert_allclose(row["estimate"], np.mean(found["sink_mass"]))
        assert row["low"] < row["estimate"] < row["high"]
    assert len(table) == 3 * (6 * 7 + 6)
    assert len(script.figure_of(table.reset_index()).axes) == 4
