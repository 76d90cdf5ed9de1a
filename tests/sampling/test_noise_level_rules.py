"""Samplers with a noise level equal the published rules, written out in tests/published_noise_rules.py.

A case draws settings, prompts of different lengths and a seed; the rules run on each prompt alone, sinklens on the
padded batch. The networks are those of the reference data, in float64; of two of them also a copy that reads the noise
level, which the public one does not.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import published_noise_rules as noise_rules
import published_rules as rules
import pytest
from random_cases import determined, distinct, in_parts
from timed import loader

import sinklens
from sinklens.families import SAMPLERS as REGISTERED
from sinklens.sampling.decisions import RowNoise

Settings = dict[str, Any]
MODES = [
    "pure-posterior", "pure-posterior", "pure-pc", "constant-0.4", "max-capped-0.3", "max-rescale-0.5",
    "constant-remdm-0.02",
]  # fmt: skip


def mdlm(rng: random.Random) -> Settings:
    return {
        "predictor": rng.choice(["ddpm", "ddpm_cache", "analytic"]), "steps": rng.randint(1, 9),
        "noise_removal": rng.random() < 0.7,
    }  # fmt: skip


def mdlm_windows(rng: random.Random) -> Settings:
    length = rng.randint(1, 7)
    return {
        "window_length": length, "stride_length": rng.randint(1, length), "window_steps": rng.randint(1, 6)
    }  # fmt: skip


def sedd(rng: random.Random) -> Settings:
    return mdlm(rng) | {"predictor": rng.choice(["euler", "analytic"])}


def bd3lm_owt(rng: random.Random) -> Settings:
    first = rng.random() < 0.5
    return {
        "first_hitting": first, "num_steps": rng.randint(4 if first else 1, 9), "nucleus_p": rng.choice([1.0, 0.6, 0.2])
    }  # fmt: skip


def psi(rng: random.Random) -> Settings:
    modes = {f"{part}_mode": rng.choice(MODES) for part in ("high", "middle", "low")}
    level = rng.choice(["linear", "linear-constant-linear-0.4", "linear-constant-linear-0.9-inv"])
    steps, high, middle = rng.randint(1, 9), rng.choice([0.0, 0.2, 0.45]), rng.choice([0.0, 0.3])
    return modes | {
        "steps": steps, "final_step": rng.choice(["ancestral", "greedy", "none"]),
        "top_p": rng.choice([None, 0.9, 0.3]), "eps": rng.choice([1e-5, 0.05]), "time_profile": level,
        "high_frac": high, "middle_frac": middle if steps > 2 else 0.0,  # at least one time remains for the end
    }  # fmt: skip


def gidd(rng: random.Random) -> Settings:
    return {"steps": rng.randint(1, 9), "min_p": rng.choice([0.0, 0.01, 0.3])}


def gidd_correction(rng: random.Random) -> Settings:
    return {
        "steps": rng.randint(1, 9), "temperature": rng.choice([0.5, 1.0, 3.0]), "t0": rng.choice([0.01, 0.3]),
        "early_stopping": rng.random() < 0.7, "early_stopping_patience": rng.randint(1, 3),
    }  # fmt: skip


SAMPLERS: dict[str, tuple[Callable[[random.Random], Settings], Any, list[str]]] = {
    "mdlm": (mdlm, noise_rules.mdlm, ["mdlm", "mdlm timed"]),
    "mdlm-windows": (mdlm_windows, noise_rules.mdlm_windows, ["mdlm", "mdlm timed"]),
    "sedd": (sedd, noise_rules.sedd, ["sedd"]),
    "bd3lm-owt": (bd3lm_owt, noise_rules.bd3lm_owt, ["bd3lm-owt", "bd3lm-owt timed"]),
    "duo": (psi, noise_rules.duo, ["duo"]),
    "remdm": (psi, noise_rules.remdm, ["mdlm", "mdlm timed"]),
    "gidd": (gidd, noise_rules.gidd, ["gidd"]),
    "gidd-self-correction": (gidd_correction, noise_rules.gidd_correction, ["gidd"]),
}
"""Sampler -> how its settings are drawn, its published rules, and the networks."""


@pytest.fixture(scope="module")
def networks(conformance: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], noise_rules.Network]:
    """A network of the reference data by name."""

    load = loader(conformance, tmp_path_factory.mktemp)

    @cache
    def network(name: str) -> noise_rules.Network:
        model = load(name, dtype="float64")
        return noise_rules.Network(model, -1 if model.mask_token_id is None else model.mask_token_id)

    return network


def prompts_of(sampler: str, size: int, rng: random.Random) -> list[rules.Ids]:
    """One to three prompts; blocks of BD3-LM are counted from the first column, so its prompts have one length."""
    shared = rng.randint(1, 6) if sampler == "bd3lm-owt" else None
    lengths = [rng.randint(0, 5) if shared is None else shared for _ in range(rng.randint(1, 3))]
    return [[rng.randrange(size) for _ in range(length)] for length in lengths]


def compare(networks: Callable[[str], noise_rules.Network], sampler: str, seed: int, rng: random.Random) -> None:
    draw, rule, names = SAMPLERS[sampler]
    net = networks(rng.choice(names))
    size = net.model.cfg.d_vocab if net.mask < 0 else net.mask
    given = draw(rng) | {"gen_length": rng.randint(1, 8)}
    if sampler in ("duo", "gidd-self-correction") and rng.random() < 0.5:
        given["start_canvas"] = [rng.randrange(size) for _ in range(given["gen_length"])]
    if "high_frac" in given and round(given["high_frac"] * (given["steps"] + 1)) == 1:
        given["high_mode"] = "pure-pc"  # the published code fails where a part of one time needs the next one
    prompts = prompts_of(sampler, size, rng)
    noise = RowNoise(seed, prompts)
    known = given | ({"block_length": net.model.checkpoint.blocks.length} if sampler == "bd3lm-owt" else {})
    expected = [
        list(rule(net, prompt, rules.Noise(generator), known))
        for prompt, generator in zip(prompts, noise.generators, strict=True)
    ]
    run = sinklens.generate(net.model, prompts, sampler=sampler, seed=seed, record_sinks=seed % 4 == 0, **given)
    for row, canvases in enumerate(expected):
        case_of = f"{sampler} {seed}, row {row} of {prompts}: {given}"
        start = run.prompt_length - len(prompts[row])
        ours = [canvas[start : start + len(canvases[-1])] for canvas in run.canvas[row].tolist()]
        assert distinct(ours) == distinct([ours[0], *canvases]), case_of
        if len(prompts) == 1:
            assert run.steps_run == len(canvases), case_of


def test_every_sampler_with_a_noise_level_has_rules():
    assert set(SAMPLERS) == {name for name, sampler in REGISTERED.items() if sampler.sets_time}


@pytest.mark.fast_cases(3)
@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
@pytest.mark.parametrize("sampler", SAMPLERS)
@in_parts
def test_canvases_equal_the_published_rules_on_random_settings(networks, sampler, cases):
    for case in cases:
        determined(lambda rng, case=case: compare(networks, sampler, case, rng), f"{sampler} {case}")
