"""Costs of interventions: stacked sweeps, maps of a metric, and places that follow the run; parts of run.py."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformer_lens.hook_points import HookPoint

import sinklens
from benchmarks.measuring import Ratio, compare
from benchmarks.plain import ANSWER
from sinklens.experiments import sweep
from sinklens.interventions import AblateHeads, Where
from sinklens.tasks.word_problems import held_out

STEPS = 8


def sweeping(pairs: int) -> Iterator[Ratio]:
    """Ablating every head of the shipped model: one at a time ÷ stacked in one batch; with one prompt and with four."""
    model = sinklens.load("tiny-llada")
    cfg = model.cfg
    every = {
        f"{layer}.{head}": AblateHeads(layers=[layer], heads=[head])
        for layer in range(cfg.n_layers)
        for head in range(cfg.n_heads)
    }
    for count in (1, 4):
        prompts = [problem.prompt for problem in held_out(count)]

        def all_at_once(prompts: list[str] = prompts) -> object:
            return sweep(model, prompts, every, progress=False)

        def one_at_a_time(prompts: list[str] = prompts) -> object:
            return [
                sweep(model, [prompt], {name: hooks}, progress=False)
                for name, hooks in every.items()
                for prompt in prompts
            ]

        what = f"{len(every)} heads ablated: one at a time ÷ stacked (tiny-llada, prompts: {count})"
        yield compare(what, one_at_a_time, all_at_once, pairs)


def mapping(pairs: int) -> Iterator[Ratio]:
    """Every head ablated at every step alone, and the KL of the step: `sweep` ÷ a loop of single passes."""
    model = sinklens.load("tiny-llada")
    prompt = held_out(1)[0].prompt
    base = sinklens.generate(model, prompt, record_sinks=False)
    places = list(np.ndindex(model.cfg.n_layers, model.cfg.n_heads, base.steps_run))

    def kl(changed: torch.Tensor, plain: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        p, q = plain[where].log_softmax(-1), changed[where].log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean()

    def swept() -> np.ndarray:
        each = {
            place: AblateHeads(layers=[place[0]], heads=[place[1]], steps=[place[2]])
            for place in places
        }  # fmt: skip
        found = sweep(
            model, prompt, each, metric=lambda out: kl(out.logits, out.base, out.undecided), replay=True, progress=False
        )
        return found["metric"].to_numpy()[..., 0]

    @torch.no_grad()
    def looped() -> np.ndarray:
        found = np.zeros((model.cfg.n_layers, model.cfg.n_heads, base.steps_run))
        for step in range(base.steps_run):
            canvas, where = base.canvas[:, step], base.undecided[:, step]
            plain = model.tree(canvas)
            for layer, head in np.ndindex(model.cfg.n_layers, model.cfg.n_heads):

                def ablate(z: torch.Tensor, hook: HookPoint, head: int = head) -> torch.Tensor:
                    z[:, :, head] = 0
                    return z

                changed = model.tree.run_with_hooks(canvas, [(f"blocks.{layer}.attn.hook_z", ablate)])
                found[layer, head, step] = kl(changed, plain, where)
        return found

    np.testing.assert_allclose(swept(), looped(), atol=1e-4)
    what = f"{len(places)} one-step ablations, KL of each: sweep(metric=) ÷ a loop of run_with_hooks (tiny-llada)"
    yield compare(what, swept, looped, pairs)


def placing(pairs: int) -> Iterator[Ratio]:
    """Ablating half of a head's outputs at places that follow the run ÷ at static positions."""
    model, length = sinklens.load("tiny-llada"), 128
    prompt = torch.randint(3, 600, (1, length - ANSWER))
    places = torch.zeros(1, STEPS, model.cfg.n_layers, model.cfg.n_heads, length, dtype=torch.bool)
    places[..., ::2] = True

    def run(**given: Any) -> Callable[[], object]:
        return lambda: sinklens.generate(
            model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=STEPS, progress=False,
            hooks=AblateHeads(heads=[0], **given),
        )  # fmt: skip

    static, forms = run(positions=range(0, length, 2)), {
        "an array": places, "a function of the step": lambda step: range(0, length, 2), "a token kind": "digit",
        "the strongest keys": Where(top_k=1), "those of the same step": Where(top_k=1, same_step=True),
    }  # fmt: skip
    for what, where in forms.items():
        at = f"AblateHeads, sinks recorded, tiny-llada, S = {length}"
        yield compare(f"where= {what} ÷ positions= ({at})", run(where=where), static, pairs)
