"""Every sampler equals the published decision rules, written out in tests/published_rules.py, on random settings.

A case draws settings, prompts of different lengths and a seed; the rules run on each prompt alone, sinklens on the
padded batch. Models are random, in float64, so that no decision is a question of rounding.
"""

import copy
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import published_rules as rules
import pytest
import torch
from building import random_hf
from random_cases import determined, distinct, in_parts

import sinklens
from sinklens.errors import SettingError
from sinklens.families import SAMPLERS as REGISTERED
from sinklens.families import Family
from sinklens.hooks.attention.blocks import Blocks
from sinklens.model import Model
from sinklens.model.loading import prepare
from sinklens.sampling.decisions import RowNoise

VOCABULARY, MASK, ENDS = 13, 12, (3, 7)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "mask_token_id": MASK,
    "initializer_range": 0.5,
}  # fmt: skip

Settings = dict[str, Any]


@cache
def model_of(
    attention: str, shift: bool, length: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Model, rules.Oracle]:
    """A random model as sinklens prepares it, and an untouched copy for the rules."""
    hf = random_hf("qwen3", attention == "causal", dtype, **SIZES)
    oracle = rules.Oracle(copy.deepcopy(hf), MASK, ENDS)
    oracle.hf.set_attn_implementation("sdpa")
    start = "column" if attention == "block-columns" else "token"
    family = Family(
        "random", (), "qwen3", {"causal": "autoregressive", "full": "llada"}.get(attention, "sdar"), "not at all",
        causal=attention == "causal", shift=shift, mask_token_id=MASK, block_causal=length > 0,
    )  # fmt: skip
    raw = hf.config.to_dict() | {"eos_token_id": list(ENDS)}
    return Model(prepare(hf, None, family, raw, "random", blocks=Blocks(length, start) if length else None)), oracle


def truncation(rng: random.Random) -> Settings:
    return {
        "temperature": rng.choice([0.0, 0.0, 0.5, 1.0, 1.7]),
        "top_p": rng.choice([None, None, 0.3, 0.6, 0.9, 1.0]),
        "top_k": rng.choice([None, None, 1, 2, 4, 9, 40]),
    }


def dividing(rng: random.Random) -> Settings:
    """Lengths of samplers whose blocks and steps have to divide the answer."""
    size, blocks = rng.randint(1, 6), rng.randint(1, 3)
    return {"gen_length": size * blocks, "block_length": size, "steps": blocks * rng.randint(1, size)}


def llada(rng: random.Random) -> Settings:
    given = dividing(rng) | {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.5]), "cfg_scale": rng.choice([0.0, 0.0, 0.8]),
        "remasking": rng.choice(["low_confidence", "low_confidence", "random"]), "threshold": None, "factor": None,
        "by_quota": True, "logits_eos_inf": rng.random() < 0.2, "confidence_eos_eot_inf": rng.random() < 0.2,
    }  # fmt: skip
    if given["remasking"] == "low_confidence":
        rule = rng.choice(["quota", "threshold", "factor"])
        if rule != "quota":
            given |= {rule: rng.choice([0.2, 0.5, 0.9]), "by_quota": rng.random() < 0.3}
    return given


def dream(rng: random.Random) -> Settings:
    length = rng.randint(1, 10)
    given = {"gen_length": length, "steps": rng.randint(1, 14), "eps": rng.choice([1e-3, 0.1])} | truncation(rng)
    given |= {"alg": rng.choice(["origin", "maskgit_plus", "topk_margin", "entropy"])}
    given |= {"threshold": None, "tokens_per_step": None, "alg_temp": rng.choice([None, None, 0.0, 0.001, 0.5])}
    if given["alg"] != "origin" and rng.random() < 0.5:
        given["threshold"] = -rng.choice([0.2, 0.8, 1.5]) if given["alg"] == "entropy" else rng.choice([0.3, 0.6])
        if not given["alg_temp"] and rng.random() < 0.5:
            divisors = [number for number in range(1, length + 1) if length % number == 0]
            given |= {"tokens_per_step": rng.choice(divisors), "steps": length}
    return given


def dream_blocks(rng: random.Random) -> Settings:
    given = dividing(rng) | truncation(rng) | {"eps": rng.choice([1e-3, 0.1]), "threshold": None}
    given["alg"] = rng.choice(["maskgit_plus", "topk_margin", "entropy"])
    if rng.random() < 0.5:
        given["threshold"] = -rng.choice([0.2, 0.8, 1.5]) if given["alg"] == "entropy" else rng.choice([0.3, 0.6])
        given["steps"] = given["gen_length"]
    return given


def open_dcoder(rng: random.Random) -> Settings:
    given = {"gen_length": rng.randint(1, 10), "steps": rng.randint(1, 14), "eps": rng.choice([1e-3, 0.1])}
    given |= truncation(rng) | {"alg": rng.choice(["p2", "maskgit_plus", "topk_margin", "entropy"])}
    return given | {"alg_temp": None if given["alg"] == "p2" else rng.choice([None, 0.0, 0.001, 0.5])}


def diffullama(rng: random.Random) -> Settings:
    return {
        "gen_length": rng.randint(1, 10), "steps": rng.randint(1, 14), "order": rng.choice(["random", "confidence"]),
        "temperature": rng.choice([0.5, 0.9, 1.5]), "top_p": rng.choice([0.3, 0.9, 1.0]), "greedy": rng.random() < 0.3,
    }  # fmt: skip


def rnd1(rng: random.Random) -> Settings:
    given = {"gen_length": rng.choice([1, 2, 5, 9, 22]), "steps": rng.choice([1, 3, 5, 9, 12, 22])}
    given |= truncation(rng) | {"temperature": rng.choice([0.3, 1.0, 1.5]), "greedy": rng.random() < 0.6}
    return given | {"eb_gamma": rng.choice([None, None, 0.0, 0.5, 3.0]), "closing": rng.choice(["none", "eos"])}


def in_blocks(rng: random.Random) -> Settings:
    """Lengths of samplers of block-causal models; the answer need not be complete blocks."""
    size = rng.choice([2, 3, 4, 6])
    return {"gen_length": rng.randint(1, 11), "block_length": size, "stop": rng.random() < 0.7} | {
        "use_cache": rng.random() < 0.5
    }


def sdar(rng: random.Random) -> Settings:
    given = in_blocks(rng) | truncation(rng)
    strategies = ["sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"]
    return given | {
        "denoising_steps": rng.randint(1, given["block_length"]), "remasking_strategy": rng.choice(strategies),
        "threshold": rng.choice([0.2, 0.5, 0.85]), "eb_threshold": rng.choice([0.35, 1.0, 3.0]),
        "confidence_of": rng.choice(["draw", "model"]),
    }  # fmt: skip


def llada2(rng: random.Random) -> Settings:
    given = in_blocks(rng) | truncation(rng) | {"threshold": rng.choice([0.2, 0.5, 0.95])}
    given["minimal_topk"] = rng.randint(1, given["gen_length"])
    return given | {
        "denoising_steps": rng.randint(1, 9), "eos_early_stop": given["stop"] and rng.random() < 0.5,
    }  # fmt: skip


def llada21(rng: random.Random) -> Settings:
    return in_blocks(rng) | truncation(rng) | {
        "threshold": rng.choice([0.2, 0.5, 0.9]), "editing_threshold": rng.choice([0.0, 0.3, 0.6, 1.0]),
        "max_post_steps": rng.randint(0, 4), "num_to_transfer": rng.randint(1, 3),
    }  # fmt: skip


def guided(rng: random.Random) -> Settings:
    return {
        "temperature": rng.choice([0.0, 0.7, 1.5]), "cfg_scale": rng.choice([0.0, 0.8, 2.0]),
        "remasking": rng.choice(["low_confidence", "low_confidence", "random"]),
    }  # fmt: skip


def bd3lm(rng: random.Random) -> Settings:
    return in_blocks(rng) | guided(rng) | {"steps": rng.randint(1, 14), "right_shift_logits": rng.random() < 0.3}


def bd3lm_card(rng: random.Random) -> Settings:
    return in_blocks(rng) | guided(rng) | {"denoising_steps": rng.randint(1, 8)}


def fast_dllm_v2(rng: random.Random) -> Settings:
    given = in_blocks(rng) | {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7]),
        "top_p": rng.choice([0.3, 0.6, 0.95, 1.0]),
    }
    sizes = [size for size in range(1, given["block_length"] + 1) if given["block_length"] % size == 0]
    return given | {"small_block_size": rng.choice(sizes), "threshold": rng.choice([0.2, 0.6, 1.0])}


def autoregressive(rng: random.Random) -> Settings:
    return {"gen_length": rng.randint(1, 10), "use_cache": rng.random() < 0.5} | truncation(rng)


SAMPLERS: dict[str, tuple[Callable[[random.Random], Settings], Any, str, bool]] = {
    "llada": (llada, rules.llada, "full", False),
    "dream": (dream, rules.dream, "full", True),
    "dream-blocks": (dream_blocks, rules.dream_blocks, "full", True),
    "open-dcoder": (open_dcoder, rules.open_dcoder, "full", True),
    "diffullama": (diffullama, rules.diffullama, "full", True),
    "rnd1": (rnd1, rules.rnd1, "full", True),
    "sdar": (sdar, rules.sdar, "block", False),
    "llada2": (llada2, rules.llada2, "block", False),
    "llada2.1": (llada21, rules.llada21, "block", False),
    "bd3lm": (bd3lm, rules.bd3lm, "block-columns", False),
    "bd3lm-card": (bd3lm_card, rules.bd3lm_card, "block", False),
    "fast-dllm-v2": (fast_dllm_v2, rules.fast_dllm_v2, "block", True),
    "autoregressive": (autoregressive, rules.autoregressive, "causal", False),
}
"""Sampler -> how its settings are drawn, its published rules, and the attention and shift of its models."""


def compare(sampler: str, seed: int, rng: random.Random) -> None:
    given = SAMPLERS[sampler][0](rng)
    prompts = [[rng.randrange(MASK) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 3))]
    compare_runs(sampler, given, prompts, seed, recording=seed % 4 == 0)


def compare_runs(sampler: str, given: Settings, prompts: list[rules.Ids], seed: int, recording: bool) -> None:
    """Compare the canvases of a batch with those of the rules, row by row."""
    _, rule, attention, shift = SAMPLERS[sampler]
    model, oracle = model_of(attention, shift, given["block_length"] if attention.startswith("block") else 0)
    noise, longest = RowNoise(seed, prompts), max(map(len, prompts))
    run = sinklens.generate(model, prompts, sampler=sampler, seed=seed, record_sinks=recording, **given)
    for row, prompt in enumerate(prompts):
        lead = longest - len(prompt) + (-longest % given["block_length"] if sampler == "bd3lm" else 0)
        canvases = list(rule(oracle, prompt, rules.Noise(noise.generators[row]), given | {"lead": lead}))
        start, found = run.prompt_length - len(prompt), run.canvas[row].tolist()
        length = len(canvases[-1])
        ours = [canvas[start : start + length] for canvas in found]
        case_of = f"{sampler} {seed}, row {row} of {prompts}: {given}"
        if sampler == "autoregressive":
            assert ours[-1] == canvases[-1], case_of
            continue
        assert distinct(ours) == distinct([ours[0], *canvases]), case_of
        if len(prompts) == 1:
            assert run.steps_run == len(canvases), case_of


def test_every_sampler_without_a_noise_level_has_rules():
    modes = {"nemotron-diffusion", "nemotron-dllm", "linear-speculation"}  # conformance/test_nemotron_diffusion.py
    assert {*SAMPLERS, "diffusion-gemma", *modes} == {name for name, one in REGISTERED.items() if not one.sets_time}


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("sampler", SAMPLERS)
@in_parts
def test_canvases_equal_the_published_rules_on_random_settings(sampler, cases):
    for case in cases:
        determined(lambda rng, case=case: compare(sampler, case, rng), f"{sampler} {case}")


class Replayed(rules.Oracle):
    """The logits of a run's steps, one after the other, instead of a model's."""

    passes: list[torch.Tensor]
    shift: bool

    def logits(self, ids, seen=None):
        rows = self.passes.pop(0)[0].tolist()
        return [*rows[1:], rows[-1]] if self.shift else rows


ROUNDED = [name for name in SAMPLERS if name not in ("diffullama", "autoregressive")]
"""Samplers whose code computes confidences and can be greedy."""


def compare_rounded(sampler: str, case: int, rng: random.Random, confidence_dtype: str, monkeypatch) -> bool:
    """Whether the canvases of logits in bfloat16 equal those of the rules in a dtype, where many confidences do."""
    draw, rule, attention, shift = SAMPLERS[sampler]
    given = draw(rng)
    given |= {"greedy": True} if sampler == "rnd1" else {"temperature": 0.0}
    fixed = {
        "cfg_scale": 0.0,
        "factor": None,
        "by_quota": True,
        "alg_temp": None,
        "use_cache": False,
        "right_shift_logits": False,
    }
    given |= {name: value for name, value in fixed.items() if name in given}
    given |= {"alg": "entropy"} if given.get("alg") == "origin" else {}
    given |= {"remasking": "low_confidence"} if "remasking" in given else {}
    given |= {"remasking_strategy": "low_confidence_static"} if given.get("eb_threshold") else {}
    length = given["block_length"] if attention.startswith("block") else 0
    model, oracle = model_of(attention, shift, length, torch.bfloat16)
    generator, passes = torch.Generator().manual_seed(case), list[torch.Tensor]()

    def nearly_sure(value, hook):
        drawn = torch.randn(value.shape, generator=generator)
        passes.append(drawn.scatter_add(2, drawn.argmax(2, keepdim=True), drawn[:, :, :1].abs() + 5).to(value))
        return passes[-1]

    prompt = [rng.randrange(MASK) for _ in range(rng.randint(1, 9))]
    hooks = [("denoise.hook_logits", nearly_sure)]
    more = {"confidence_dtype": confidence_dtype, "hooks": hooks, "record_sinks": False, "sampler": sampler}
    run = sinklens.generate(model, [prompt], **given, **more)
    dtype = torch.bfloat16 if confidence_dtype == "model" else getattr(torch, confidence_dtype)
    for name in ("threshold", "editing_threshold"):  # a CPU compares a tensor with a number in the tensor's dtype
        if given.get(name) is not None:
            given[name] = torch.tensor(given[name], dtype=dtype).item()
    monkeypatch.setattr(rules, "PRECISION", [dtype])
    replayed = Replayed(*oracle)
    given["lead"] = run.prompt_length - len(prompt)
    replayed.passes, replayed.shift = [one[:, given["lead"] :] for one in passes], shift
    canvases = list(rule(replayed, prompt, rules.Noise(torch.Generator()), given))
    ours = [canvas[given["lead"] :][: len(canvases[-1])] for canvas in run.canvas[0].tolist()]
    return distinct(ours) == distinct([ours[0], *canvases])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("sampler", ROUNDED)
@in_parts
def test_confidences_in_the_dtype_of_the_published_code_choose_as_it_does(sampler, cases, monkeypatch):
    for case in cases:
        chosen = "float32" if case % 4 == 3 else "model"
        name = f"rounded {sampler} {case}"

        def equal(rng: random.Random, case: int = case, chosen: str = chosen) -> None:
            assert compare_rounded(sampler, case, rng, chosen, monkeypatch), f"{sampler} {case}"

        determined(equal, name)


TIED = [name for name in SAMPLERS if name not in ("llada", "bd3lm", "bd3lm-card", "autoregressive")]
"""Samplers that rank proposals and can draw from a distribution of one token, of probability 1 and entropy 0."""


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("sampler", TIED)
@in_parts
def test_equal_confidences_are_ordered_by_the_published_call(sampler, cases):
    def tied(rng: random.Random, case: int) -> None:
        given = SAMPLERS[sampler][0](rng) | {"temperature": 1.0}
        given |= {"top_p": 1e-6} if sampler in ("fast-dllm-v2", "diffullama") else {"top_k": 1}
        given |= {"order": "confidence"} if sampler == "diffullama" else {}
        given |= {"remasking_strategy": "low_confidence_static", "confidence_of": "draw"} if sampler == "sdar" else {}
        given |= {"eb_gamma": None} if sampler == "rnd1" else {}
        given |= {"alg_temp": None} if "alg_temp" in given else {}
        given |= {"threshold": 1.0} if sampler in ("fast-dllm-v2", "llada2", "llada2.1") else {}
        prompts = [[rng.randrange(MASK) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 3))]
        compare_runs(sampler, given, prompts, case, recording=False)

    for case in cases:
        determined(lambda rng, case=case: tied(rng, case), f"tied {sampler} {case}")


@pytest.mark.parametrize(
    ("sampler", "more", "tied"),
    [
        ("dream", {}, True),
        ("dream", {"temperature": 0.0, "top_k": None}, False),
        ("dream", {"alg_temp": 1.0}, False),
        ("dream", {"alg": "origin"}, False),
        ("open-dcoder", {"alg": "p2"}, True),
        ("open-dcoder", {}, True),
        ("rnd1", {}, True),
        ("sdar", {"remasking_strategy": "low_confidence_static"}, True),
        ("sdar", {"remasking_strategy": "sequential"}, False),
        ("sdar", {}, False),
        ("llada2", {"threshold": 1.0}, True),
        ("llada2.1", {"threshold": 1.0}, True),
    ],
)
def test_a_run_counts_the_positions_that_were_chosen_among_equals(sampler, more, tied):
    """One token has all the probability, so that proposals are equal."""
    _, _, attention, shift = SAMPLERS[sampler]
    model, _ = model_of(attention, shift, 4 if attention == "block" else 0)
    given: Settings = {"gen_length": 8, "temperature": 1.0, "top_k": 1} | more
    prompts = [[5, 9, 1, 4], [8, 2, 0, 6]]
    shown: dict[str, list[torch.Tensor]] = {"confidence": [], "commit": []}
    hooks = [
        (f"denoise.hook_{name}", lambda value, hook, kept=kept: kept.append(value)) for name, kept in shown.items()
    ]
    run = sinklens.generate(model, prompts, sampler=sampler, record_sinks=False, hooks=hooks, **given)
    assert run.ties.shape == (2, run.steps_run)
    assert bool(run.ties.any()) is tied
    judges_decided = given.get("alg") == "p2" or sampler == "llada2.1"
    for step, (confidence, chosen) in enumerate(zip(*shown.values(), strict=True)):
        for row in range(2 if tied and not judges_decided else 0):
            left = [c for c, here in zip(confidence[row].tolist(), chosen[row].tolist(), strict=True) if not here]
            assert int(run.ties[row, step]) == sum(c in left for c in confidence[row][chosen[row]].tolist())
    assert (f"{int(run.ties.sum())} chosen among equal confidences" in repr(run)) is tied


@pytest.mark.parametrize("guidance", [0.0, 0.8])
def test_a_row_that_ends_leaves_the_sealed_prompt_of_another(guidance):
    """The second row is still in its first block, where its prompt does not see the answer, when the first ends."""
    given = {
        "gen_length": 6, "block_length": 6, "temperature": 0.0, "cfg_scale": guidance, "denoising_steps": 6,
        "remasking": "low_confidence", "stop": True,
    }  # fmt: skip
    for prompts in ([[4], [1]], [[5, 9], [8]], [[3], [8]]):
        compare_runs("bd3lm-card", given, prompts, seed=0, recording=False)


def test_a_pass_of_other_rows_within_a_step_that_seals_prompts_is_refused():
    model, _ = model_of("block", False, 6)

    def one_row(canvas, hook):
        model(canvas[:1])

    with pytest.raises(SettingError, match=r"a pass of 1 rows cannot be matched with the 2 rows of this step"):
        sinklens.generate(
            model, [[4], [1]], sampler="bd3lm-card", gen_length=3, hooks=[("denoise.hook_canvas", one_row)]
        )


@in_parts
def test_rows_of_a_batch_with_the_sub_block_cache_equal_runs_of_them_alone(cases):
    """Keys of the cache are stale, so runs with it have no rule without a model of the cache."""
    for case in cases:
        rng = random.Random(f"sub-block {case}")
        given = fast_dllm_v2(rng) | {"use_cache": False, "use_block_cache": True, "sampler": "fast-dllm-v2"}
        prompts = [[rng.randrange(MASK) for _ in range(rng.randint(1, 9))] for _ in range(3)]
        model, _ = model_of("block", True, given["block_length"])
        together = sinklens.generate(model, prompts, seed=case, record_sinks=False, **given)
        for row, prompt in enumerate(prompts):
            alone = sinklens.generate(model, [prompt], seed=case, record_sinks=False, **given)
            start, length = together.prompt_length - len(prompt), alone.canvas.shape[2]
            ours = together.canvas[row, :, start : start + length].tolist()
            assert distinct(ours) == distinct(alone.canvas[0].tolist()), f"{case}, row {row} of {prompts}: {given}"


# --- random tokens instead of masks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(conformance: Path) -> Model:
    """The tiny DiffusionGemma, with so many end tokens that rows end."""
    model = sinklens.load(conformance / "diffusion-gemma")
    model.eos_token_ids = tuple(range(2, model.cfg.d_vocab, 9))
    return model


def canvases(rng: random.Random) -> Settings:
    low = rng.choice([0.0, 0.2, 0.4])
    return {
        "gen_length": 8 * rng.randint(1, 2), "max_denoising_steps": rng.randint(1, 5),
        "entropy_bound": rng.choice([0.1, 1.0, 4.0]), "t_min": low, "t_max": low + rng.choice([0.1, 0.5]),
        "stability_threshold": rng.randint(0, 2), "confidence_threshold": rng.choice([0.005, 0.3, 1.0, 2.5]),
        "pad_token_id": rng.choice([0, 5]),
    }  # fmt: skip


def compare_canvases(model: Model, case: int, rng: random.Random) -> None:
    """Compare a run with the rules, which get the logits and the random numbers of each step."""
    given, size = canvases(rng), 250  # later tokens stand for images
    prompts = [[rng.randrange(size) for _ in range(rng.randint(3, 8))] for _ in range(rng.randint(1, 3))]
    logits: list[torch.Tensor] = []
    hooks = [("denoise.hook_logits", lambda value, hook: logits.append(value.clone()))]
    run = sinklens.generate(model, prompts, seed=case, record_sinks=False, hooks=hooks, **given)
    noise = [rules.Noise(generator) for generator in RowNoise(case, prompts).generators]
    found = rules.diffusion_gemma(logits, model.eos_token_ids, noise, given | {"canvas_length": 8})
    steps = 0
    for steps, frame in enumerate(found):
        for row, answer in enumerate(frame):
            ours = run.canvas[row, steps, run.prompt_length :]
            assert ours[ours >= 0].tolist() == answer, f"{case}, row {row}, step {steps} of {prompts}: {given}"
    assert steps == run.steps_run


@in_parts
def test_canvases_of_random_tokens_equal_the_published_rules_on_random_settings(gemma, cases):
    for case in cases:
        determined(lambda rng, case=case: compare_canvases(gemma, case, rng), f"diffusion-gemma {case}")
