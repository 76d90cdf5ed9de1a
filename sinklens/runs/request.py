"""What a run is asked to compute: the arguments that `trace`, `generate` and `sweep` share, as one record.

Pitfall: only the seed and the form of the hooks are checked at once. Most checks need the model, so they wait until
`Denoising` reads the request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sinklens.errors import HookNameError
from sinklens.hooks.names import HookName
from sinklens.integers import check_seed_of
from sinklens.runs.intervention import HookFunction, Intervention
from sinklens.runs.result import Replayable
from sinklens.sampling.key_cache import Policy
from sinklens.sinks.record import Record

HOOKS = (
    "hooks= must be a list of (name or predicate, function) pairs and interventions, "
    "[(name, fn), MaskSinks(top_k=1), …]"
)
Hooks = Intervention | Sequence[tuple[HookName, HookFunction] | Intervention]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The arguments of one run; `sinklens.trace` documents them.

    Attributes:
        prompt: a string, a list of strings, or token ids [pos] or [batch, pos].
        settings: settings of the sampler as given, and the sampler's name if one is chosen.
        seed: seed of the random numbers.
        chat_template: True for the tokenizer's chat template, or a template string.
        hooks: (name or predicate, function) pairs and interventions.
        record_sinks: whether sinks are recorded, or what is recorded.
        replay: an earlier run, or canvases [batch, steps + 1, pos], forced at every step.
        cache: a cache policy or its name; None computes every position in every step.
        progress: whether a progress bar is shown; None shows it on a terminal.
        copies: how many times the prompts are repeated in the batch, one complete copy after another (`sweep`).
        entries: the hooks as a tuple; a generator can be read only once.
    """

    prompt: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    chat_template: bool | str = False
    hooks: Hooks = ()
    record_sinks: bool | Record = True
    replay: Replayable | Tensor | None = None
    cache: Policy | str | None = None
    progress: bool | None = None
    copies: int = 1
    entries: tuple[tuple[HookName, HookFunction] | Intervention, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_seed_of(self)
        object.__setattr__(self, "entries", tuple(hook_list(self.hooks)))


def hook_list(hooks: Hooks) -> list[Any]:
    """`hooks` as a list; one intervention stands for a list of it.

    Raises:
        HookNameError: it is neither an intervention nor a list.
    """
    if isinstance(hooks, Intervention):
        return [hooks]
    if not isinstance(hooks, Iterable) or isinstance(hooks, str | Mapping):
        raise HookNameError(f"{HOOKS}; got {hooks!r:.80}.")
    return list(hooks)
