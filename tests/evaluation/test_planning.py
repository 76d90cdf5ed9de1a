"""Plans: operations equal those that PyTorch counts in a pass, and passes those that runs make."""

import shutil

import pytest
import torch
from building import random_hf, random_model
from torch.utils.flop_counter import FlopCounterMode

from sinklens.errors import SettingError
from sinklens.evaluation import evaluate, masking
from sinklens.evaluation.planning import CARDS, Card, find_card, plan
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.run_memory import flops_of
from sinklens.model.files import find_checkpoint
from sinklens.tasks import find_task
from sinklens.tasks.prompts import IdSample

SIZES = {"hidden_size": 48, "head_dim": 8, "intermediate_size": 80, "max_position_embeddings": 128}
PROMPT, ANSWER = 20, 12


def samples(number=3):
    return [IdSample(str(one), "", "", ids=(1,) * PROMPT) for one in range(number)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_operations_of_a_pass_equal_those_that_pytorch_counts(architecture):
    """A plain pass; beside it, sums over columns repeat the product of queries and keys, and logits are of masks."""
    hf = random_hf(architecture, **SIZES)
    hf.set_attn_implementation("eager")
    if architecture.endswith("moe"):
        hf.set_experts_implementation("eager")  # PyTorch does not count grouped products
    length = PROMPT + ANSWER
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hf(torch.ones(1, length, dtype=torch.long))
    config = hf.config
    width = config.num_hidden_layers * config.num_attention_heads * 8
    head = 2 * config.hidden_size * config.vocab_size
    sums, unneeded = 2 * length**2 * width, head * (length - ANSWER / 2)
    found = flops_of(random_model(architecture, **SIZES), length, length, ANSWER / 2)
    assert found == pytest.approx(counter.get_total_flops() + sums - unneeded, rel=0.02)


@pytest.mark.extended
def test_passes_are_those_of_the_runs_and_guidance_doubles_them(tiny_llada, tmp_path):
    conditions = masking([1], ["random"])
    protocol, task = find_protocol("tiny-gsm"), find_task("tiny-gsm")
    found = plan("tiny-llada", protocol, conditions, task.samples(2))
    runs = evaluate(tiny_llada, protocol, conditions, tmp_path, limit=2)
    steps = sum(record["steps"] for run in runs for record in run.records())
    assert (found.samples, found.runs, found.passes) == (2, 3, steps)
    guided = plan("tiny-llada", protocol.with_settings({"cfg_scale": 1.0}), conditions, task.samples(2))
    assert (guided.passes, guided.flops) == (2 * found.passes, pytest.approx(2 * found.flops))
    tokens = [len(tiny_llada.encode(sample.prompt)[0][0]) for sample in task.samples(2)]
    assert (found.prompt_tokens, found.counted) == (sum(tokens) / 2, True)


@pytest.mark.extended
def test_conditions_that_take_keys_of_the_unmasked_run_make_it_too(tiny_llada):
    protocol, some = find_protocol("tiny-gsm"), find_task("tiny-gsm").samples(2)
    found = plan("tiny-llada", protocol, masking([1], of_unmasked=True), some)
    assert found.runs == 4  # unmasked, 1 sink, and the sinks of an unmasked run
    assert found.disk_row_bytes > 0
    assert plan("tiny-llada", protocol, masking([1]), some).disk_row_bytes == 0


@pytest.mark.extended
def test_without_a_tokenizer_the_length_of_prompts_is_guessed(tmp_path):
    shutil.copy(find_checkpoint("tiny-llada", None) / "config.json", tmp_path)
    some = find_task("tiny-gsm").samples(2)
    found = plan(tmp_path, find_protocol("tiny-gsm"), masking([]), some)
    assert (found.counted, found.prompt_tokens) == (False, sum(len(one.prompt) for one in some) / 8)


@pytest.mark.extended
def test_an_autoregressive_model_reads_the_prompt_once(tiny_llama):
    protocol = find_protocol("tiny-gsm").with_settings({"gen_length": 16})
    once, twice = (
        plan("tiny-llama", protocol, masking([]), [sample] * 2) for sample in find_task("tiny-gsm").samples(2)
    )
    assert once.passes == twice.passes == 2 * 16
    # about two operations for each of its parameters
    assert once.flops / (2 * (16 + once.prompt_tokens)) == pytest.approx(2 * 1.5e6, rel=0.6)


def test_time_follows_from_the_card():
    found = plan("tiny-llada", find_protocol("tiny-gsm"), masking([]), samples())
    card = Card("slow", 1e9, 1e9)
    assert found.seconds(card, 0.5) == found.flops / 0.5e9
    assert found.seconds(card, 0.5, cards=4) == found.flops / 2e9


def test_an_unknown_card_names_the_known_ones():
    assert find_card("h100") is CARDS["h100"]
    with pytest.raises(SettingError, match=r"no card is called 'h10'; known: .*h100, .* Nearest: h100"):
        find_card("h10")
