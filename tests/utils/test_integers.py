"""Integers and seeds: what counts as one, in every function that takes a seed."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.analyses import find
from sinklens.errors import SettingError
from sinklens.evaluation import UNMASKED, evaluate, masking
from sinklens.experiments import donors, effect, sweep
from sinklens.interventions import AblateHeads, MaskSinks
from sinklens.tasks import word_problems
from sinklens.utils.arguments import Seed, read_as
from sinklens.utils.integers import as_integer

PROMPT = "Question: 1 + 2\nAnswer:"
FEW = {"gen_length": 4, "steps": 2, "progress": False}


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_an_integer_of_any_type_is_read_as_pythons(given):
    assert type(as_integer(given)) is int
    assert as_integer(given) == read_as(Seed, "seed", given) == 3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", [1.5, 2**64], ids=repr)
@pytest.mark.parametrize(
    "use",
    [
        lambda model, out, seed: sinklens.generate(model, PROMPT, seed=seed, **FEW),
        lambda model, out, seed: sinklens.trace(model, PROMPT, seed=seed, **FEW),
        lambda model, out, seed: effect(model, PROMPT, seed=seed, gen_length=4),
        lambda model, out, seed: sweep(model, PROMPT, {"a": AblateHeads()}, seed=seed, **FEW),
        lambda model, out, seed: donors(model, PROMPT, "blocks.0.attn.hook_z", seed=seed, gen_length=4),
        lambda model, out, seed: evaluate(model, "tiny-gsm", [UNMASKED], out, seed=seed),
        lambda model, out, seed: masking([1], ["random"], seed=seed),
        lambda model, out, seed: MaskSinks(top_k=1, pick="random_any", seed=seed),
        lambda model, out, seed: AblateHeads(seed=seed),
        lambda model, out, seed: find("existence")(seed=seed),
        lambda model, out, seed: word_problems.training(seed, 1),
    ],
    ids=["generate", "trace", "effect", "sweep", "donors", "evaluate", "masking", "MaskSinks", "AblateHeads",
         "study", "training"],
)  # fmt: skip
def test_every_function_with_a_seed_has_one_rule_for_it(tiny_llada, tmp_path, use, seed):
    with pytest.raises(SettingError, match="seed must be an integer from 0"):
        use(tiny_llada, tmp_path / "out", seed)
    assert not (tmp_path / "out").exists()


def test_a_numpy_seed_draws_what_the_same_python_seed_draws(tiny_llada, unchecked):
    runs = [sinklens.generate(tiny_llada, PROMPT, seed=seed, temperature=1.0, **FEW) for seed in (3, np.int64(3))]
    assert torch.equal(runs[0].canvas, runs[1].canvas)
    assert repr(MaskSinks(top_k=1, pick="random_any", seed=np.int64(3))) == repr(
        MaskSinks(top_k=1, pick="random_any", seed=3)
    )
