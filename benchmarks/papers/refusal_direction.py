"""Is a behavior governed by one direction? Measured on a planted one. (docs/papers/refusal-direction.md)

`Plant` makes tiny-llada refuse, with an empty answer, if the prompt asks about certain things: one hook writes a random
direction at every position, another one raises the logit of the end token with the direction's component. The
difference of means must find the direction, removing it must end the refusals and adding it must cause them; a random
direction and the difference of means of the model without the plant must do neither. It took 8 seconds of CPU time on
one core.
"""

from typing import Any

import torch
from torch import Tensor

import sinklens
from sinklens.experiments import difference_of_means
from sinklens.interventions import Steer
from sinklens.tasks.word_problems import held_out, training
from sinklens.utils.estimates import Estimate, proportion

REFUSED = (" eggs", " coins", " books", " pens", " toys", " cups")
STRENGTH, THRESHOLD = 30.0, 15.0
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


def main() -> None:
    """Print the table."""
    model = sinklens.load("tiny-llada")
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


if __name__ == "__main__":
    main()
