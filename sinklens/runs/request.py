"""The arguments of a run, as `trace`, `generate` and the functions built on them pass them on.

Pitfall: a request is made without a model. What depends on the model, such as the settings of its sampler, is checked
when `Denoising` reads the request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from sinklens.errors import HookNameError
from sinklens.hooks.names import HookName
from sinklens.runs.intervention import HookFunction, HookSource
from sinklens.runs.result import Replayable
from sinklens.sampling.policies import CachePolicy
from sinklens.sinks.record import Record
from sinklens.utils.arguments import Seed, Unread, Words, check_arguments
from sinklens.utils.progress import Progress

HOOKS = (
    "hooks= must be a list of (name or predicate, function) pairs and interventions, "
    "[(name, fn), MaskSinks(top_k=1), …]"
)
Recorded = Annotated[bool | Record, Words("True, False or a Record such as Record(['values'])")]
Hooks = Annotated[HookSource | Sequence[tuple[HookName, HookFunction] | HookSource], Unread]


@dataclass(frozen=True)
class RunRequest:
    """The arguments of one run, checked; `generate` says what each means.

    Attributes:
        hooks: as a tuple; a single intervention stands for a list of one.
        settings: the sampler's settings as given, and the sampler's name if one is chosen.
        copies: how many times the prompts are repeated in the batch, one complete copy after another.

    Raises:
        SettingError: an argument has another type or is out of range.
        HookNameError: `hooks` is not a list.
    """

    prompts: Any
    seed: Seed = 0
    chat_template: bool | str = False
    hooks: Any = ()
    record_sinks: Recorded = True
    replay: Replayable | Tensor | None = None
    cache: CachePolicy | None = None
    progress: Progress = None
    allow_longer: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "hooks", tuple(hook_list(self.hooks)))
        check_arguments(self)


def hook_list(hooks: Hooks) -> list[Any]:
    """`hooks` as a list; a single intervention stands for a list of one.

    Raises:
        HookNameError: it is neither an intervention nor a list.
    """
    if isinstance(hooks, HookSource):
        return [hooks]
    if not isinstance(hooks, Iterable) or isinstance(hooks, str | Mapping):
        raise HookNameError(f"{HOOKS}; got {hooks!r:.80}.")
    return list(hooks)
