"""Plans of runs: their memory is what runs take, their formulas are those of the sizes, and no weights are read."""

import json
import multiprocessing
import shutil
from typing import Any

import pytest
import torch
from building import random_hf, random_model

import sinklens
from benchmarks.measuring import peak
from sinklens.cli import main
from sinklens.cli.planning import duration, size_text
from sinklens.errors import CheckpointError, HookNameError, SettingError
from sinklens.evaluation import run_memory
from sinklens.evaluation.cards import CARDS, QUANTIZATIONS, Card
from sinklens.evaluation.run_memory import plan_run
from sinklens.hooks.attention import column_sums, layer_sums
from sinklens.model.files import find_checkpoint

GIVEN = {"gen_length": 8, "steps": 4, "block_length": 8}
SIZES: dict[str, Any] = {
    "vocab_size": 3000, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "mask_token_id": 2999,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    return plan_run("tiny-llada", batch_size=4, prompt_length=20, watch=["patterns"], dtype=torch.float32, **GIVEN)


def test_weights_tracks_and_points_follow_from_the_sizes(plan, tiny_llada):
    cfg, length = tiny_llada.cfg, 28
    parameters = sum(value.numel() for value in tiny_llada.hf.parameters())
    assert (plan.parameters, plan.weights, plan.track) == (
        parameters, 4 * parameters, 4 * 4 * (cfg.n_layers * cfg.n_heads * length * 4 + 6 * length),
    )  # fmt: skip
    run = sinklens.generate(tiny_llada, [list(range(10, 30))] * 4, progress=False, **GIVEN)
    assert plan.track == sum(run.sinks[name].nbytes for name in ("score", "token_id", "masked", "committed"))


@pytest.mark.parametrize(
    ("name", "width", "config"),
    [
        ("bnb-int8", 1, {"load_in_8bit": True}),
        ("bnb-nf4", 0.5625, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ],
)
def test_quantized_weights_are_those_of_linear_layers_by_the_bytes_of_their_form(
    plan, tiny_llada, tmp_path, name, width, config
):
    layers = [layer for name, layer in tiny_llada.hf.named_modules() if name.endswith("_proj")]
    inside = sum(one.weight.numel() for one in layers)
    assert plan.alternatives["none"] == plan.weights
    assert plan.alternatives[name] == 4 * (plan.parameters - inside) + width * inside
    assert list(plan.alternatives) == list(QUANTIZATIONS)
    raw = json.loads((find_checkpoint("tiny-llada") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    stored = plan_run(tmp_path, batch_size=4, prompt_length=20, watch=["patterns"], dtype=torch.float32, **GIVEN)
    assert (stored.quantization, stored.alternatives) == (name, {name: plan.alternatives[name]})
    assert (stored.step, stored.flops, stored.moved < plan.moved) == (plan.step, plan.flops, True)
    with pytest.raises(SettingError, match=r"quantized already, by bitsandbytes, so quantization='bnb-nf4' does not"):
        plan_run(tmp_path, quantization="bnb-nf4", **GIVEN)


def test_keys_are_those_of_the_positions_that_are_cached(tiny_llama):
    found = plan_run("tiny-llama", batch_size=2, prompt_length=20, gen_length=12, dtype=torch.float32)
    cfg = tiny_llama.cfg
    assert found.keys == 2 * 2 * cfg.n_layers * cfg.n_key_value_heads * cfg.d_head * 32 * 4
    assert found.first_keys == found.keys * 20 // 32


def test_cards_and_batches_follow_from_the_bytes(plan):
    assert plan.cards((plan.weights / 2 + plan.step) / 0.9 + 1) == 2
    assert (plan.cards(plan.device_bytes / 0.9 + 1), plan.cards(plan.step / 0.9)) == (1, 0)
    batch = plan.largest_batch(2 * plan.device_bytes)
    fits = [plan.with_batch(number).device_bytes <= 0.9 * 2 * plan.device_bytes for number in (batch, batch + 1)]
    assert (fits, plan.largest_batch(plan.weights)) == ([True, False], 0)


def test_time_is_the_longer_of_operations_and_bytes(plan):
    assert plan.seconds(Card("x", 1e9, 1.0, 1e30), 0.5) == plan.passes * plan.flops / 0.5e9
    assert plan.seconds(Card("x", 1e30, 1.0, 1e9), 0.5) == plan.passes * plan.moved / 1e9


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_plan_of_experts_counts_their_projections_in_any_element_type(dtype):
    """Two experts per token: the gated projections, 2 · 160 values, of the last step of an MLP are its peak."""
    found = plan_run(
        "tiny-llada-moe", batch_size=8, prompt_length=120, gen_length=8, steps=4, record_sinks=False, dtype=dtype
    )
    routed, stream = 8 * 128 * 2, 8 * 128 * 192
    least = (routed * (2 * 160 + 160 + 192) + 3 * stream) * dtype.itemsize
    assert least < found.step < 1.7 * least


def test_a_plan_needs_no_weights(tmp_path, monkeypatch):
    shutil.copy(find_checkpoint("tiny-llada") / "config.json", tmp_path)
    found = [plan_run(one, prompt_length=4, **GIVEN) for one in (tmp_path, tmp_path / "config.json", "tiny-llada")]
    assert len({one.device_bytes for one in found}) == 1
    asked = {}

    def download(name, allow_patterns, **more):
        asked[name] = allow_patterns
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name, text in (("a/b", r"could not download 'a/b'.*pass their folder"), (tmp_path / "no", "neither a folder")):
        with pytest.raises(CheckpointError, match=text):
            plan_run(name)
    assert not any("safetensors" in pattern for pattern in asked["a/b"])


@pytest.mark.parametrize(
    ("given", "utilization", "error", "text"),
    [
        (
            {"quantization": "3bit"},
            1,
            SettingError,
            r"no quantization is called '3bit'; known: none, bnb-int8, bnb-nf4",
        ),
        ({"batch_size": 0}, 1, SettingError, r"batch and a prompt of at least 1; got 0"),
        (
            {"batch_size": 99999999999999},
            1,
            SettingError,
            r"a plan has at most 4,194,304 positions; 99,999,999,999,999 rows of 136 are more",
        ),
        ({"batch_size": 10**30}, 1, SettingError, r"a plan has at most 4,194,304 positions"),
        (
            {"prompt_length": 99999999999999},
            1,
            SettingError,
            r"at most 4,194,304 positions; 1 rows of 100,000,000,000,007 are",
        ),
        ({"watch": ["hook_patern"]}, 1, HookNameError, r"no hook point is called 'hook_patern'"),
        ({"prompt_length": 4}, 0.0, SettingError, "utilization is above 0"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(given, utilization, error, text):
    with pytest.raises(error, match=text):
        plan_run("tiny-llada", **given, **GIVEN).seconds(CARDS["h100"], utilization)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_a_few_blocks_of_scores_take_as_much_memory_as_all(monkeypatch, name):
    monkeypatch.setitem(column_sums.BLOCK_ELEMENTS, "cpu", 1500)
    given = {"batch_size": 3, "prompt_length": 60, "gen_length": 8}
    few = plan_run(name, **given)
    monkeypatch.setattr(run_memory, "BLOCKS", None)
    assert plan_run(name, **given) == few


def test_a_long_prompt_can_be_planned():
    assert plan_run("tiny-llada", prompt_length=1_000_000, gen_length=8, steps=8).step > 10**9


def test_the_command_prints_memory_time_and_cards(capsys, monkeypatch, plan):
    monkeypatch.setattr(run_memory, "plan_run", lambda *given, **more: plan)
    main(["plan", "tiny-llada", "--cards", "h100"])
    text = capsys.readouterr().out
    for part in (
        "on the device",
        f"weights (bfloat16): {plan.weights / 2**20:.2f} MiB",
        "for watched points",
        "H100 SXM",
        "24 GiB: none: 1 card, batch",
        f"{plan.host_bytes / 2**10:.2f} KiB for the track",
    ):
        assert part in text
    assert " 0.00 " not in text


@pytest.mark.parametrize(
    ("write", "given", "text"),
    [
        (size_text, 0, "0 bytes"), (size_text, 1023, "1,023 bytes"), (size_text, 1024, "1.00 KiB"),
        (size_text, 1_500_000, "1.43 MiB"), (size_text, 2**30 - 1, "1,024.00 MiB"), (size_text, 2**30, "1.00 GiB"),
        (size_text, 5 * 2**40, "5,120.00 GiB"), (duration, 0.00123, "1.23 milliseconds"),
        (duration, 1.5, "1.50 seconds"), (duration, 75.0, "75 seconds"),
    ],
)  # fmt: skip
def test_sizes_and_times_are_printed_in_the_unit_that_shows_them(write, given, text):
    assert write(given) == text


def measured(name, sizes, batch, prompt, watch, settings, pipe):
    """The peak of the tensors of a run in a process of its own, with small blocks of scores; else up to 2 MiB."""
    layer_sums.TOGETHER, column_sums.BLOCK_ELEMENTS["cpu"] = 1, 1 << 17
    model = sinklens.load(name) if isinstance(name, str) else random_model(*name, **sizes)
    ids = torch.randint(10, 60, (batch, prompt))
    hooks = [((lambda point, end=run_memory.WATCHED[one]: point.endswith(end)), lambda v, hook: None) for one in watch]
    pipe.send(peak(lambda: sinklens.generate(model, ids, hooks=hooks, progress=False, **settings)) * 1e6)


def peak_of(*given):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=measured, args=(*given, there))
    process.start()
    found = here.recv()
    process.join()
    return found


CASES = {
    "llada": ("tiny-llada", 8, 64, [], {"gen_length": 32, "steps": 2, "block_length": 32}),
    "patterns": ("tiny-llada", 4, 80, ["patterns"], {"gen_length": 32, "steps": 2, "block_length": 32}),
    "guidance": ("tiny-llada", 4, 64, [], {"gen_length": 32, "steps": 2, "block_length": 32, "cfg_scale": 1.0}),
    "dream": ("tiny-dream", 8, 64, [], {"gen_length": 32, "steps": 2}),
    "mmada": ("tiny-mmada", 8, 64, ["streams"], {"gen_length": 32, "steps": 2, "block_length": 32}),
    "autoregressive": ("tiny-llama", 8, 64, [], {"gen_length": 32}),
    "sdar": ("tiny-sdar", 8, 64, [], {"gen_length": 32}),
    "experts": ("tiny-llada-moe", 8, 96, [], {"gen_length": 32, "steps": 2, "block_length": 32}),
    "experts, one row": ("tiny-llada-moe", 1, 64, [], {"gen_length": 32, "steps": 2, "block_length": 32}),
    "experts, patterns": (
        "tiny-llada-moe", 4, 112, ["patterns"], {"gen_length": 16, "steps": 2, "block_length": 16}
    ),
    "random, wide experts": (("qwen3_moe", True), 4, 224, [], {"gen_length": 32}),
    "random, wide vocabulary": (("llama", False), 4, 128, [], {"gen_length": 128, "steps": 2, "block_length": 128}),
    "random, long": (("llama", False), 2, 480, ["scores"], {"gen_length": 32, "steps": 2, "block_length": 32}),
    "random, nucleus": (("qwen2", False), 4, 128, [], {"gen_length": 64, "steps": 2, "temperature": 0.5, "top_p": 0.9}),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_the_planned_peak_is_within_a_tenth_of_the_measured_one(case, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_sums, "KEPT", 1)  # a CPU and a GPU collect the sums of different numbers of layers
    name, batch, prompt, watch, settings = CASES[case]
    source = name
    if not isinstance(name, str):
        settings = settings | ({"sampler": "dream"} if "top_p" in settings else {})
        random_hf(*name, **SIZES).config.save_pretrained(tmp_path)
        source = tmp_path
    # causal ones are known by their model_type
    family = {} if isinstance(name, str) or name[1] else {"load": {"family": f"a2d-{name[0]}"}}
    found = plan_run(
        source, batch_size=batch, prompt_length=prompt, watch=watch, dtype=torch.float32, **family, **settings
    )
    assert found.working == pytest.approx(peak_of(name, SIZES, batch, prompt, watch, settings), rel=0.1)
