"""A notebook on GPT-2 in TransformerLens's words runs here with another load line, and gives TransformerLens's numbers.

The steps are those of an exploratory analysis: logit attribution of layers and heads, a patching heat map of the
stream, the ablation of a head, and induction heads on repeated random tokens. `notebook` has the code of the cells,
which does not say whose model it has.
"""

from functools import partial
from typing import Any

import pytest
import torch
from building import small_tokenizer
from transformer_lens import patching, utilities
from transformers import GPT2Config, GPT2LMHeadModel

import sinklens

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 48, "vocab_size": 643}
HEAD = (1, 2)


@pytest.fixture(scope="module")
def hf():
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.2, bos_token_id=0, eos_token_id=66)).eval()


@pytest.fixture(scope="module")
def ours(hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    hf.save_pretrained(folder)
    return sinklens.load(folder)  # the load line of the notebook


@pytest.fixture(scope="module")
def theirs(hf, tmp_path_factory):
    from transformer_lens.model_bridge.sources.transformers import boot

    return boot("gpt2", hf_model=hf, tokenizer=small_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def prompts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clean and corrupted prompts, which differ in one token, and the pairs of tokens whose logits are compared."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(100, 600, (4, 9), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 3] = torch.randint(100, 600, (4,), generator=generator)
    return clean, corrupted, torch.randint(100, 600, (4, 2), generator=generator)


def logit_difference(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    last = logits[:, -1].gather(-1, answers)
    return (last[:, 0] - last[:, 1]).mean()


@torch.no_grad()
def notebook(model: Any) -> dict[str, torch.Tensor]:
    """The cells."""
    clean, corrupted, answers = prompts()
    logits, cache = model.run_with_cache(clean)
    found = {"logit difference": logit_difference(logits, answers)}

    # which layers and heads write it
    unembedding = model.W_U[:, answers]  # [d_model, batch, 2]
    direction = (unembedding[..., 0] - unembedding[..., 1]).T

    def attributed(stack: torch.Tensor, layer: int) -> torch.Tensor:
        return (cache.apply_ln_to_stack(stack, layer=layer, pos_slice=-1) * direction).sum(-1).mean(-1)

    streams, labels = cache.accumulated_resid(layer=-1, incl_mid=True, pos_slice=-1, return_labels=True)
    assert labels[-1] == "final_post"
    found["lens"] = attributed(streams, -1)
    found["heads"] = attributed(cache.stack_head_results(layer=-1, pos_slice=-1), -1)

    # where the difference between the prompts is
    metric = partial(logit_difference, answers=answers)
    found["patching"] = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)

    # a head without its output
    def ablate(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[:, :, HEAD[1]] = 0.0
        return value

    hooks = [(utilities.get_act_name("z", HEAD[0]), ablate)]
    found["loss"] = model(clean, return_type="loss")
    found["ablated"] = model.run_with_hooks(clean, return_type="loss", fwd_hooks=hooks)

    # attention to the token after the last occurrence of this one
    length = 16
    once = torch.randint(100, 600, (6, length), generator=torch.Generator().manual_seed(1))
    repeated = torch.cat([once, once], dim=1)
    scores = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)

    def induction(pattern: torch.Tensor, hook: Any) -> None:
        scores[hook.layer()] = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - length).mean(dim=(0, -1))

    model.run_with_hooks(
        repeated, return_type=None, fwd_hooks=[(lambda name: name.endswith("hook_pattern"), induction)]
    )
    return found | {"induction": scores}


def test_a_notebook_on_gpt2_gives_the_numbers_of_transformerlens(ours, theirs):
    here, there = notebook(ours), notebook(theirs)
    assert here.keys() == there.keys()
    for name, value in here.items():
        torch.testing.assert_close(
            value.float(), there[name].float(), rtol=1e-4, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert here["patching"].shape == (3, 9)
    assert (here["patching"][:, :3] - here["patching"][0, 0]).abs().max() < 1e-4, "before the edit the prompts agree"
    assert here["patching"][:, 3:].std() > 1e-3
    assert abs(here["ablated"] - here["loss"]) > 1e-4
    assert here["induction"].min() > 0
