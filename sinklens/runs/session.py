"""`trace` and `generate`: denoising runs with and without a block.

The body of ``with sinklens.trace(model, prompt) as t:`` does not execute in place. nnsight captures it and runs it
interleaved with the model: it pauses at each value it requests, the model runs until it has computed that value, and
the body resumes and may change the value. sinklens adds the steps (steps.py): before each step the sampler serves the
step's number at a separate location; ``for step in t.steps`` waits there. After the last step it receives `RUN_ENDED`,
so the loop ends and the statements after it run.

Silent failure: points must be requested in the order in which a step reaches them. nnsight would serve a point
requested too late from the *next* step, without an error. At the end of every step sinklens checks for requests that
are still waiting and raises `HookOrderError` on the requesting line.
"""

from collections.abc import Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from sinklens.errors import HookOrderError, SinklensError, require
from sinklens.hooks.hook_functions import refuse_other
from sinklens.hooks.interleaving import BlockTracer
from sinklens.hooks.points import Point
from sinklens.model import Model, load
from sinklens.runs.caches import Activations
from sinklens.runs.denoising import Denoising
from sinklens.runs.intervention import HookFunction
from sinklens.runs.recorder import after
from sinklens.runs.request import Hooks, Recorded, RunRequest
from sinklens.runs.result import Generation, Replayable
from sinklens.runs.steps import StepServer, VisitedSteps
from sinklens.sampling.policies import CachePolicy
from sinklens.utils.arguments import Seed, plainly_shown
from sinklens.utils.progress import Progress


@plainly_shown
def trace(
    model: Any,
    prompts: Any,
    *,
    seed: Seed = 0,
    chat_template: bool | str = False,
    hooks: Hooks = (),
    record_sinks: Recorded = True,
    replay: Replayable | Tensor | None = None,
    cache: CachePolicy | None = None,
    progress: Progress = None,
    allow_longer: bool = False,
    **settings: Any,
) -> "Trace":
    """Open a denoising run; use it as ``with sinklens.trace(model, prompt) as t:``.

    Inside the block, `t` reads and writes the values of every step by name:

        for step in t.steps:                                  # or t.steps[8:], t.steps[[0, 5]], t.steps[-1]
            pattern = t["blocks.2.attn.hook_pattern"]         # [batch, head, query, key]
            t["blocks.2.attn.hook_pattern"][:, 3] = 0         # changes what the model computes

    After the block, `t` has the attributes of `Generation`: ``t.text``, ``t.tokens``, ``t.canvas``, ``t.unmask_step``,
    ``t.sinks``. Variables assigned in the block are available after it.

    Args:
        model: a `Model`, or anything `sinklens.load` accepts.
        prompts, seed, chat_template, hooks, record_sinks, replay, cache, progress, allow_longer, **settings: as in
            `generate`.

    Raises:
        PromptError: the prompt is empty, too long, contains the mask token, or is text for a model without a tokenizer.
        SettingError: a setting is unknown or out of range.
        HookNameError: a name in `hooks` (or in the block) is not a hook point.
        HookOrderError: the block requested a point that the step had already passed.
    """
    given = prompts, seed, chat_template, hooks, record_sinks, replay, cache, progress, allow_longer, settings
    return Trace(denoising_of(model, RunRequest(*given)))


@plainly_shown
def generate(
    model: Any,
    prompts: Any,
    *,
    seed: Seed = 0,
    chat_template: bool | str = False,
    hooks: Hooks = (),
    record_sinks: Recorded = True,
    replay: Replayable | Tensor | None = None,
    cache: CachePolicy | None = None,
    progress: Progress = None,
    allow_longer: bool = False,
    **settings: Any,
) -> Generation:
    """Run denoising without a block.

        run = sinklens.generate(model, prompts, gen_length=64, hooks=[("blocks.1.attn.hook_z", fn)])
        run.text, run.canvas, run.unmask_step, run.sinks

    Args:
        model: a `Model`, or anything `sinklens.load` accepts.
        prompts: a string, a list of strings (left-padded), or token ids [pos] or [batch, pos].
        seed: the same seed, prompt and settings give the same result. A row's result does not depend on its batch, but:
            (1) with ``threshold=`` or several canvases a finished row waits for the slowest, unchanged; (2) these
            waiting steps count for interventions at given steps, and for keys drawn at every step; (3) at a temperature
            above 0, copies of one prompt in one batch get different random numbers; (4) with cached blocks, the scores
            by which an intervention chooses keys cover the current blocks of all rows.
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
        cache: a policy of `sinklens.sampling` (`DualCache()`, or its name, "dual"): which keys and values a step
            computes, reuses or hides. Every policy but `NoCache`, the default, approximates. For bidirectional models
            only; those with causal or block-causal attention reuse keys exactly (``use_cache``).
        progress: show a progress bar; by default on a terminal, after a few seconds. Or a function, called with the
            number of steps done and of all.
        allow_longer: run prompts and answers that need more positions than the model was made for, with a warning; not
            in networks with an embedding for each position.
        **settings: settings of the model's sampler, such as `sinklens.families.llada.LladaSettings`;
            `sinklens.families.settings_for(model, {})` shows those of a model. Omitted ones default to the
            checkpoint's values, then to the sampler's. Passing ``gen_length`` resets the checkpoint's ``steps`` and
            ``block_length``. ``sampler`` chooses another sampler than the family's, by name
            (`sinklens.families.SAMPLERS`).

    Returns:
        The result of the run: text, canvases, when each token was decided, and sinks.

    Raises:
        SinklensError: see `trace`.
    """
    given = prompts, seed, chat_template, hooks, record_sinks, replay, cache, progress, allow_longer, settings
    return carried_out(denoising_of(model, RunRequest(*given)))


def denoising_of(model: Any, request: RunRequest) -> Denoising:
    """The run that a request asks for, on a model or anything that `sinklens.load` accepts.

    Raises:
        SinklensError: the model has edits, which would act in single traces only.
    """
    loaded = load(model)
    require(
        not loaded.has_edits,
        "this model has edits from model.edit(), which act in single traces (model.trace) but not in runs. Pass "
        "the change as hooks=[(name, fn)], or write it in the block of sinklens.trace; model.clear_edits() removes "
        "the edits.",
        SinklensError,
    )
    return Denoising(loaded, request)


def carried_out(denoising: Denoising) -> Generation:
    """The result of a run without a block.

    Raises:
        HookOrderError: a block of the model is running.
    """
    with denoising.model.turn:
        _refuse_nesting(denoising.model)
        denoising.carry_out()
        denoising.controls.report()
        return denoising.result()


def _refuse_nesting(model: Model) -> None:
    """Reject a run inside a block of the same model, which would receive that run's values.

    Raises:
        HookOrderError: a block of `model` is running.
    """
    require(
        not model.handover.running,
        f"a trace block of {model.name} is running; another run of the same model cannot start inside it. Run it "
        f"before or after the block, or on a second model (sinklens.load again).",
        HookOrderError,
    )


class Trace(BlockTracer):
    """An open run; see `trace`. It is an nnsight tracer, so ``t.stop()``, ``t.cache()`` and ``.save()`` work."""

    STANDS_FOR: ClassVar[type] = Generation

    def __init__(self, denoising: Denoising) -> None:
        seen = denoising.rows  # under guidance the conditional rows of a pass
        super().__init__(denoising.model, seen, 2 * seen if denoising.settings.guided else seen)
        self._denoising = denoising
        self._generation: Generation | None = None
        self._handles: list[Any] = []  # hooks on the points that `cache` keeps
        self.server: StepServer | None = None
        self.steps = VisitedSteps(self)

    def __repr__(self) -> str:
        return f"Trace({self._generation!r})" if self._generation is not None else "Trace(not run yet)"

    @property
    def generation(self) -> Generation:
        """The result of the run, as `generate` would return it."""
        if self._generation is None:
            raise HookOrderError("t.generation is available after the run; read it below the `with` block.")
        return self._generation

    @property
    def iter(self) -> VisitedSteps:
        """nnsight's name for `steps`: ``t.iter[4:8]`` is ``t.steps[4:8]``."""
        return self.steps

    def all(self) -> VisitedSteps:
        """nnsight's name for `steps`, all of them."""
        return self.steps

    def next(self) -> int:
        """Wait for the step after the current one, as in earlier versions of nnsight; returns its number.

        Raises:
            HookOrderError: the run ended before it.
        """
        step = 1 if self.step is None else self.step + 1
        if step < self.planned:
            for reached in self.steps[step]:
                return reached
        raise HookOrderError(f"t.next() waits for step {step}, but the run ended before it; loop over t.steps instead.")

    @property
    def planned(self) -> int:
        """Number of planned steps; fewer run if all rows end early."""
        return self._denoising.settings.most_steps

    @property
    def running(self) -> bool:
        """Whether the block is running."""
        return self._denoising.model.handover.running

    @property
    def step(self) -> int | None:
        """The current step; None outside the block."""
        return self._denoising.model.tree.watch.forward_pass.step

    def stop(self) -> None:
        """End the run here; the rest of the block does not run.

        Earlier steps are kept, the current one is not: after ``t.stop()`` in step 6, ``t.steps_run`` is 6. In step 0
        only the initial canvas remains: every answer position is a mask, and ``t.sinks`` is None.

        Raises:
            SinklensError: no step has begun, as before the loop over ``t.steps``; raised at the end of the block.
            HookOrderError: called outside the block.
        """
        require(
            self.running,
            "t.stop() was called outside its `with sinklens.trace(...)` block; call it inside the block.",
            HookOrderError,
        )
        super().stop()

    def cache(self, names: Any = None, steps: Sequence[int] | None = None, **options: Any) -> Any:
        """Cache the values of points from here on, as TransformerLens `ActivationCache` objects by step.

            caches = t.cache(["blocks.2.hook_resid_post"], steps=[0, 5])    # in the block
            caches[5]["blocks.2.hook_resid_post"]                           # after it

        Values are cached after the block's edits. Without names, or with nnsight modules instead of names, this is
        nnsight's ``cache``.

        Args:
            names: points in any accepted spelling, one or a list, or a predicate on names.
            steps: step indices; negative ones count from the end. None means all. Steps that have passed are missing.

        Raises:
            HookNameError: a point or module does not exist.
            SettingError: a step does not exist, or options of nnsight's cache are combined with names of points (or the
                reverse).
            HookOrderError: called outside the block or after the run.
        """
        listed = names if isinstance(names, list | tuple) else [names]
        points = all(isinstance(entry, str | FunctionType) for entry in listed)
        require(
            not options if points else steps is None,
            "steps= requires names of hook points, t.cache(names, steps=...); other options are those of nnsight's "
            "cache(modules=...), which keeps every step.",
        )
        if not points:
            return super().cache(**options) if names is None else super().cache(names, **options)
        if self.server is None or not self.running or self.server.over:
            raise HookOrderError(
                "t.cache(names) keeps values computed after the call: call it inside the `with sinklens.trace(...)` "
                "block, before the steps to keep."
            )
        denoising, kept = self._denoising, Activations(names=names, steps=steps)
        for name, keep in kept.hooks_for(denoising.model, denoising.context()):
            point: Point = denoising.model.tree.hook_dict[name]  # type: ignore[assignment]
            self._handles.append(after(point, partial(_keep_rows, keep, point, denoising.rows)))
        return kept.caches

    def __getitem__(self, name: str) -> Any:
        """The value at the hook point `name` in this step; in-place edits take effect."""
        return self._point(name).output

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace the value at the hook point `name` in this step.

        Raises:
            HookFunctionError: `value` differs from the value at this point in shape, dtype or device.
        """
        point, resolved = self._point(name), self._denoising.model.tree.resolve(name)
        refuse_other(
            value, point.output, f"the value assigned to t[{name!r}]", resolved,
            "assign a tensor of that shape, or edit parts in place: t[name][:] = 0",
        )  # fmt: skip
        point.output = value

    def _point(self, name: str) -> Any:
        model: Model = self._denoising.model
        resolved = model.tree.resolve(name)
        require(
            self.running,
            f"t[{name!r}] has a value only during the run: read it inside the `with sinklens.trace(...)` block and "
            f"assign it to a variable. After the block, t.canvas, t.sinks and t.text remain available.",
            HookOrderError,
        )
        return model.get(resolved)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in Generation.__dataclass_fields__ or hasattr(Generation, name):
            if self._generation is None:
                raise HookOrderError(f"t.{name} is available after the run; read it below the `with` block.")
            return getattr(self._generation, name)
        model = self._denoising.model
        if model.has_child(name):
            return getattr(model, name)
        raise AttributeError(
            f"a trace has no attribute {name!r}; read hook points as t['blocks.0.hook_resid_pre'], sinks as t.sinks."
        )

    if TYPE_CHECKING:

        def __enter__(self) -> "Trace": ...

    def begin(self) -> None:
        """Called before the block runs."""
        require(
            self._generation is None,
            "this trace has already run; call sinklens.trace(...) again for another run.",
            SinklensError,
        )
        _refuse_nesting(self._denoising.model)
        self.server = StepServer(self._denoising.model, self._denoising.settings.name)

    def carry_out(self) -> Generation:
        """Run all steps and store the result."""
        assert self.server is not None
        self._denoising.carry_out([self.server])
        self._denoising.controls.report()
        self._generation = self._denoising.result()
        self.server.close(self.values_at_end())
        return self._generation

    def values_at_end(self) -> dict[str, Any]:
        """Values that a block may wait for when its run has ended, by nnsight's location."""
        return {}

    def end(self) -> None:
        """Called after the block has run, including after an error."""
        self.server = None
        for handle in self._handles:
            handle.remove()

    def execute(self, code: CodeType) -> None:
        """Run the captured body interleaved with the sampler, then copy the names it assigned to its frame."""
        super().execute(code)
        if self._generation is None:  # t.stop() ended the run
            self._generation = self._denoising.result()


def _keep_rows(keep: HookFunction, point: Point, rows: int, value: Tensor) -> None:
    """Keep a value without the unconditional rows of guidance."""
    keep(value[:rows], point)
