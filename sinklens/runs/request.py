"""What a run is asked to compute: the arguments of every function that makes a run, declared once.

`trace` and `generate` take these arguments (`takes`). `sweep`, `collect` and the lab's form have some of them, with the
same names and types; the command line makes its options from them.

Pitfall: a request knows no model. What depends on one, such as the settings of its sampler, is checked when `Denoising`
reads the request.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Annotated, Any, Unpack

from torch import Tensor

from sinklens.caching.registry import CachePolicy
from sinklens.errors import HookNameError
from sinklens.hooks.names import HookName
from sinklens.runs.intervention import HookFunction, HookSource
from sinklens.runs.result import Replayable
from sinklens.sampling import RunSettings
from sinklens.sinks.record import Record
from sinklens.utils.arguments import Seed, Words, check_arguments

HOOKS = (
    "hooks= must be a list of (name or predicate, function) pairs and interventions, "
    "[(name, fn), MaskSinks(top_k=1), …]"
)
Recorded = Annotated[bool | Record, Words("True, False or a Record such as Record(['values'])")]
Hooks = HookSource | Sequence[tuple[HookName, HookFunction] | HookSource]


class RunRequest:
    """The arguments of one run.

    Args:
        prompt: a string, a list of strings (left-padded), or token ids [pos] or [batch, pos].
        seed: the same seed, prompt and settings give the same result. A row's result does not depend on its batch, with
            three exceptions: with ``threshold=`` or several canvases a finished row waits for the slowest, unchanged;
            these waiting steps count for interventions at given steps, and for keys drawn at every step; and at a
            temperature above 0, copies of one prompt in one batch get different random numbers.
        chat_template: True applies the tokenizer's chat template to text; a string is used as the template.
        hooks: ``[(name or predicate, fn), …]`` with TransformerLens functions ``fn(value, hook)``, and interventions;
            ``hook.step`` is the step. They are removed when the run ends.
        record_sinks: record the sink scores of every step, layer and head; a `sinks.Record` sets what else to record,
            and where.
        replay: an earlier run; its canvas is forced at every step, which isolates the effect of an intervention in each
            step. Its prompts may differ from these if they have the same number of tokens: then this run has its own
            prompts and the earlier run's answers on its canvases. Or canvases [batch, steps + 1, pos] like
            ``run.canvas``, with any changes from the second on; the run ends early if one of them leaves nothing to
            decide.
        cache: a policy of `sinklens.caching` (`DualCache()`, or its name, "dual"): which keys and values a step
            computes, reuses or hides. Every policy but `NoCache`, the default, approximates. For bidirectional models
            only; those with causal or block-causal attention reuse keys exactly (``use_cache``).
        progress: show a progress bar; by default on a terminal, after a few seconds.
        **settings: settings of the model's sampler: `sampling.LladaSettings`, `DreamSettings` or
            `AutoregressiveSettings`. Omitted ones default to the checkpoint's values, then to the sampler's. Passing
            ``gen_length`` resets the checkpoint's ``steps`` and ``block_length``. ``sampler`` chooses another sampler
            than the family's, by name (`sampling.SAMPLERS`).

    Attributes:
        settings: the settings as given, and the sampler's name if one is chosen.
        copies: how many times the prompts are repeated in the batch, one complete copy after another; 1 unless changed.

    Raises:
        SettingError: an argument has another type or is out of range.
        HookNameError: `hooks` is not a list.
    """

    def __init__(
        self,
        prompt: Any,
        *,
        seed: Seed = 0,
        chat_template: bool | str = False,
        hooks: Hooks = (),
        record_sinks: Recorded = True,
        replay: Replayable | Tensor | None = None,
        cache: CachePolicy | None = None,
        progress: bool | None = None,
        **settings: Unpack[RunSettings],
    ) -> None:
        self.prompt, self.seed, self.chat_template, self.hooks = prompt, seed, chat_template, tuple(hook_list(hooks))
        self.record_sinks, self.replay, self.cache, self.progress = record_sinks, replay, cache, progress
        self.settings: Mapping[str, Any] = settings
        self.copies = 1
        check_arguments(self)

    def changed(self, **changes: Any) -> "RunRequest":
        """The same request with other attributes, such as the `settings`."""
        changed = copy(self)
        for name, value in changes.items():
            assert name in vars(self), name
            setattr(changed, name, tuple(hook_list(value)) if name == "hooks" else value)
        return changed


def hook_list(hooks: Hooks) -> list[Any]:
    """`hooks` as a list; one intervention stands for a list of it.

    Raises:
        HookNameError: it is neither an intervention nor a list.
    """
    if isinstance(hooks, HookSource):
        return [hooks]
    if not isinstance(hooks, Iterable) or isinstance(hooks, str | Mapping):
        raise HookNameError(f"{HOOKS}; got {hooks!r:.80}.")
    return list(hooks)
