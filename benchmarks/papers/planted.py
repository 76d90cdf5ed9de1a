"""Do two methods find what was planted in a model, and nothing where it is absent? (docs/papers/planted.md)

    python benchmarks/papers/planted.py [MODEL ...]

*One direction.* `Plant` makes the model refuse, with an empty answer, if the prompt asks about certain things: one hook
writes a random direction at every position, another one raises the logit of the end token with the direction's
component. The difference of means must find the direction, removing it must end the refusals and adding it must cause
them; a random direction and the difference of means of the model without the plant must do neither.

*Early tokens.* In each run, the number that the answer computes (the first after "=") or, as a control, a word is
replaced at a step. Counted are the runs whose final number changes. The planted dependence: the numbers of the question
are hidden in all layers, so the final number can only follow those of the answer ("cut"). The planted absence: the
computed number is hidden as well. Each is compared with the run that hides the same positions and replaces nothing.

It took about 40 seconds of CPU time on one core for tiny-llada.
"""

import sys
from collections import defaultdict
from typing import Any

import torch
from templates import balanced, call, loaded
from torch import Tensor

import sinklens
from sinklens.experiments import difference_of_means, sweep
from sinklens.interventions import ForceTokens, HideKeys, Steer
from sinklens.tasks.word_problems import held_out, read_answer, training
from sinklens.utils.estimates import Estimate, proportion

REFUSED = (" eggs", " coins", " books", " pens", " toys", " cups")
STRENGTH, THRESHOLD = 30.0, 15.0
AT = (0, 12, 18, 23)
RUN = {"steps": 8, "record_sinks": False}


class Plant:
    """Hooks that write the planted direction (`writer`) and that act on it (`reader`)."""

    def __init__(self, model: Any) -> None:
        drawn = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0))
        self.direction = drawn / drawn.norm()
        self.words = torch.tensor([model.to_single_token(word) for word in REFUSED])
        self.end = model.tokenizer.eos_token_id
        self.seen: dict[str, Tensor] = {}
        self.writer = [("denoise.hook_canvas", self.note), ("blocks.0.hook_resid_post", self.write)]
        self.reader = [("blocks.2.hook_resid_post", self.read), ("denoise.hook_logits", self.refuse)]

    def note(self, canvas: Tensor, hook: Any) -> None:
        """Keep which rows have one of the words."""
        self.seen["asked"] = torch.isin(canvas, self.words).any(dim=1)

    def write(self, stream: Tensor, hook: Any) -> Tensor:
        """Add the direction at every position of these rows."""
        return stream + STRENGTH * self.seen["asked"][:, None, None] * self.direction

    def read(self, stream: Tensor, hook: Any) -> None:
        """Keep the largest component over positions."""
        self.seen["component"] = (stream @ self.direction).amax(dim=1)

    def refuse(self, logits: Tensor, hook: Any) -> Tensor:
        """Raise the logit of the end token by what exceeds the threshold."""
        changed = logits.clone()
        changed[..., self.end] += 8 * (self.seen["component"][:, None] - THRESHOLD).clamp(min=0)
        return changed


def directions(model: Any) -> None:
    """Print the table of directions."""
    plant = Plant(model)

    def asks(prompt: str) -> bool:
        return any(word in prompt for word in REFUSED)

    train = [problem.prompt for problem in training(seed=3, size=60)]
    bad, good = [one for one in train if asks(one)][:12], [one for one in train if not asks(one)][:12]
    test = [problem.prompt for problem in held_out(60)]
    tested = {"asked": [one for one in test if asks(one)][:14], "others": [one for one in test if not asks(one)][:14]}

    def refusals(hooks: Any, which: str) -> Estimate:
        texts = sinklens.generate(model, tested[which], hooks=hooks, **RUN).text
        return proportion(sum(not text.strip() for text in texts), len(texts))

    print("without the plant:", *(refusals([], which) for which in tested))
    print("with it:", *(refusals([*plant.writer, *plant.reader], which) for which in tested))
    given = {"where": "prompt", "point": "hook_resid_post", **RUN}
    given.pop("record_sinks")
    found = difference_of_means(model, bad, good, hooks=plant.writer, **given)
    absent = difference_of_means(model, bad, good, **given)
    random = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(1))
    for name, direction in {"found": found.values[1], "no plant": absent.values[1], "random": random}.items():
        unit = direction.float() / direction.float().norm()
        removed = Steer(unit, mode="project_out", point="hook_resid_post", layers=[1])
        added = Steer(unit, STRENGTH, point="hook_resid_post", layers=[1], where="prompt")
        print(
            name, "cosine", round(float(unit @ plant.direction), 3),
            "removed, asked:", refusals([*plant.writer, removed, *plant.reader], "asked"),
            "added, others:", refusals([added, *plant.reader], "others"),
        )  # fmt: skip


def early_tokens(model: Any) -> None:
    """Print the shares of runs that follow a replaced token."""
    followed: dict[str, list[bool]] = defaultdict(list)
    for problem in balanced(2):
        run = sinklens.generate(model, problem.prompt, record_sinks=False, progress=False)
        names = model.to_str_tokens(run.tokens[0], prepend_bos=False)
        answer = range(run.prompt_length, run.prompt_length + run.answers[0].tokens)
        computed = next(c for c in answer if c > names.index(" =", answer.start) and names[c].strip().isdigit())
        word = next(c for c in reversed(answer[:-2]) if names[c].strip().isalpha() and c < names.index("####"))
        new = {computed: " 7" if names[computed] != " 7" else " 8", word: " apples"}
        given = [c for c in range(run.prompt_length) if names[c].strip().isdigit()]
        hides = {"": [], "cut": [HideKeys(positions=given)], "hidden": [HideKeys(positions=[*given, computed])]}
        replaced = {"": computed, "cut": computed, "hidden": computed, "cut, word": word}
        interventions = {hidden: hooks for hidden, hooks in hides.items() if hooks}
        for name, column in replaced.items():
            for step in AT:
                force = ForceTokens(tokens={column: model.to_single_token(new[column])}, steps=[step])
                interventions[f"{name}, step {step}"] = [force, *hides[name.partition(",")[0]]]
        found = sweep(model, problem.prompt, interventions, progress=False)["answer"]
        texts = {name: str(found.sel(intervention=name).item()) for name in interventions} | {"": run.text or ""}
        for name in set(texts) - set(hides):
            followed[name].append(read_answer(texts[name]) != read_answer(texts[name.partition(",")[0]]))
    for name in sorted(followed):
        print(name, proportion(sum(followed[name]), len(followed[name])))


def main() -> None:
    """Print both tables."""
    for name in call(sys.argv[1:], ("tiny-llada",)).models:
        model = loaded(name, masks=True, words=[*REFUSED, " 7", " 8", " apples", " ="])
        directions(model)
        early_tokens(model)


if __name__ == "__main__":
    main()
