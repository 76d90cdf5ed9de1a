"""One run, from prompt to result, as shared by `trace`, `generate` and `sweep`.

`Denoising` takes a request (request.py), builds the initial state (start.py), binds hooks and interventions, runs the
steps and records them. Hooks are attached to the model only while the run lasts.

Pitfall: hooks belong to the model, so a run holds the model's turn (hooks/turn.py) while it lasts: a run in another
thread waits for it, and one inside a trace block of the same model is refused.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import HookFunctionError, HookNameError, HookOrderError, SinklensError, require
from sinklens.families.samplers import never_passed
from sinklens.hooks import names
from sinklens.hooks.attention.layer_sums import LayerSums
from sinklens.hooks.attention.normalizers import normalizer_name
from sinklens.hooks.hook_functions import label, takes_hook
from sinklens.hooks.points import SamplerPoint
from sinklens.model import Model
from sinklens.runs.attached import attached
from sinklens.runs.choices import Choice
from sinklens.runs.control_keys import ControlLog
from sinklens.runs.intervention import HookFunction, HookSource, RunContext, all_applied, refuse_off_canvas, row_key
from sinklens.runs.policies import VARIABLES, follow, read_by_policy, recorded
from sinklens.runs.recorder import SinkRecorder, of_pass, reading, step_canvases
from sinklens.runs.request import HOOKS, RunRequest
from sinklens.runs.result import Answer, Generation, Replayable, canvases_of, undecided_of, with_prompts
from sinklens.runs.start import start
from sinklens.sampling.decisions import among
from sinklens.sampling.key_cache import PolicyCache
from sinklens.sampling.loop import Frame, Listener, Trajectory, build_trajectory, check_replay, run
from sinklens.sampling.policies import as_policy
from sinklens.sampling.state import State
from sinklens.sinks.record import Record
from sinklens.sinks.track import SinkTrack
from sinklens.utils.memory import explained
from sinklens.utils.progress import reporting
from sinklens.utils.versions import versions


class Denoising:
    """One run, from prompt to `Generation`.

    Attributes:
        model: the model to run.
        request: the arguments of the run.
        settings: the settings used, with defaults filled in.
        state: the sampler's state; until `carry_out`, its canvas is the initial one.
        controls: what rules find; whoever runs all steps calls its `report`.
    """

    def __init__(self, model: Model, request: RunRequest, controls: ControlLog | None = None) -> None:
        model.tree.refuse_unusable()
        self.model, self.request = model, request
        self.settings, self.state = start(model, request)
        follow(request.cache, model, self.settings, self.state)
        self._vocabulary: dict[int, str] = {}
        self._named: set[str] = set()
        self.controls = ControlLog() if controls is None else controls
        self.sums = LayerSums(self.rows)
        self._choices: list[Choice] = []
        self.hooks = self._resolve(request.hooks)
        if request.replay is not None:
            self._set_replay(request.replay)
        self._frames: list[Frame] = []
        self._described = -1  # size of the vocabulary at the last `describe`
        self._recorder = self._make_recorder(request.record_sinks)

    def _set_replay(self, replay: "Replayable | Tensor") -> None:
        """Replay these canvases; those of a run with other prompts of the same lengths get this run's prompts.

        Raises:
            SettingError: this run cannot replay them.
        """
        state = self.state
        canvas = canvases_of(replay, range(min(0, state.mask_id), self.model.cfg.d_vocab))
        if isinstance(replay, Generation):
            require(
                not self.settings.leaves_masks or (replay.cache is None) == (state.keys is None),
                "by_quota=False can leave masks that a run without a cache policy decides in later blocks and a "
                "run with one does not, so their steps differ. Replay a run with the same cache=, or leave "
                "by_quota out.",
            )
            if replay.prompt_length == state.prompt_length and torch.equal(replay.real, state.real.cpu()):
                canvas = with_prompts(canvas, replay, state.canvas)
        check_replay(state, self.settings, canvas)
        state.replay, state.replay_undecided = canvas, undecided_of(replay, canvas)

    @property
    def rows(self) -> int:
        """Number of prompts in the batch."""
        return self.state.canvas.shape[0]

    def context(self) -> RunContext:
        """The context that interventions receive."""
        state, record = self.state, self.request.record_sinks
        prompts = zip(state.canvas[:, : state.prompt_length], state.real[:, : state.prompt_length], strict=True)
        keeps_places = record is True or (record is not False and record.reduce is None)  # beside a track
        return RunContext(
            tree=self.model.tree,
            real=state.real,
            prompt_length=state.prompt_length,
            steps=self.settings.most_steps,
            mask_id=state.mask_id,
            seed=self.request.seed,
            row_keys=tuple(row_key(row[real].tolist()) for row, real in prompts),
            vocabulary=self._texts,
            special=self.model.special_tokens,
            controls=self.controls,
            choices=self._choices if keeps_places else None,
            settings=self._settings_text(),
            left_to_right=self.settings.left_to_right,
            sums=self.sums,
        )

    def _settings_text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self.settings).items() if value is not None})

    def _texts(self, tokens: Collection[int]) -> dict[int, str]:
        """Text of token ids; each is decoded once."""
        if self.model.tokenizer is None:
            return {}
        new = {token for token in tokens if token >= 0} - self._vocabulary.keys()
        self._vocabulary |= {token: str(self.model.tokenizer.decode([token])) for token in new}
        return {token: self._vocabulary[token] for token in tokens if token >= 0}

    def _make_recorder(self, record: "bool | Record") -> SinkRecorder | None:
        if record is False:
            return None
        tree, state = self.model.tree, self.state
        reused = VARIABLES if state.keys is not None or self.settings.reuses_keys else {}
        return SinkRecorder(
            Record() if record is True else record, tree, self.sums, state.real.cpu(), self.settings.most_steps,
            {**dict.fromkeys(["active", *of_pass(tree)], ()), **reused}, state.keys is not None,
            self.settings.left_to_right,
        )  # fmt: skip

    def _resolve(self, entries: Sequence[Any]) -> list[tuple[str, HookFunction]]:
        """The (point, function) pairs, including those of interventions."""
        found = []
        for entry in entries:
            if isinstance(entry, HookSource):
                refuse_off_canvas(entry, self.model)
                found += entry.hooks_for(self.model, self.context())
                continue
            if not (isinstance(entry, tuple) and len(entry) == 2 and callable(entry[1])):
                raise HookNameError(f"{HOOKS}; got {entry!r}.")
            points = names.select(entry[0], self.model.hook_names(), self.model.cfg.n_layers)
            self._named.update(points if isinstance(entry[0], str) else ())
            require(
                takes_hook(entry[1]),
                f"{label(entry[1])} cannot be called as fn(value, hook=point); a hook function takes the value "
                f"and, as an argument named `hook`, the point: def fn(value, hook): ...",
                HookFunctionError,
            )
            found += [(point, entry[1]) for point in points]
        return found

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Attach the run's hooks to their points; on exit, restore the model."""
        tree, recorder = self.model.tree, self._recorder
        for passed in tree.denoise.children():
            passed.reached = None  # type: ignore[assignment]
        with (
            all_applied(self.request.hooks, self.model),
            attached(tree, self.hooks, self.rows, self.settings.guided),
            reading(read_by_policy(self.state.keys)),
            nullcontext() if recorder is None else recorder.attached(),
            tree.watch.summing(self.sums, tree.blocks),
            tree.captures.during_run(tree),
        ):
            self.state.launched = (lambda: None) if recorder is None else recorder.settle
            yield

    def carry_out(self, listeners: Sequence[Listener] = ()) -> None:
        """Run all steps.

        Raises:
            DeviceMemoryError: memory ran out; the model remains usable.
        """
        shown = reporting(self.request.progress, "steps", lambda: "denoising")
        with explained(self._what_to_lower), self._hooked(), shown as self._report:
            self._report(0, self.settings.most_steps)
            run(self.state, self.settings, [self, *listeners], self._frames)

    def _what_to_lower(self) -> str:
        """What was running when memory ran out, and what would need less."""
        doubled = ", doubled by cfg_scale," if self.settings.guided else ""
        return (
            f"{self.model.name} ran out of memory on {self.model.cfg.device} in step {len(self._frames) - 1} of "
            f"{self.settings.most_steps}, with {self.rows} rows{doubled} of {self.state.canvas.shape[1]} positions. "
            f"Lower the number of prompts at a time, gen_length or the length of the prompt, or watch fewer points, "
            f"layers and steps: hook_pattern, hook_attn_scores, hook_result and hook_logits, as in Record(patterns=…), "
            f"are the largest. Record(out='run.zarr') keeps recorded steps on disk. The model remains usable."
        )

    def result(self) -> Generation:
        """The result, after all steps or after those that ran before the run was stopped."""
        require(self._frames, "the run stopped before it began; nothing was generated.", SinklensError)
        trajectory = build_trajectory(self.state, self._frames)
        answer = slice(self.state.prompt_length, self.state.prompt_length + self.settings.gen_length)
        left = zip(trajectory.canvas[:, -1, answer], trajectory.undecided[:, -1, answer], strict=True)
        answers = tuple(self._answer(ids, undecided) for ids, undecided in left)
        return Generation(
            **vars(trajectory),
            real=self.state.real.cpu(),
            prompt_length=self.state.prompt_length,
            answers=answers,
            settings=self.settings,
            seed=self.request.seed,
            sinks=self._track(trajectory),
            single=isinstance(self.request.prompts, str),
            model=self.model,
            patterns=self._recorder.patterns if self._recorder else {},
            control_keys=self.controls.totals(self.rows),
            cache=as_policy(self.request.cache),
            chosen=tuple(self._choices),
        )

    def _answer(self, ids: Int[Tensor, " pos"], undecided: Bool[Tensor, " pos"]) -> Answer:
        masks = int((undecided & (ids >= 0)).sum())
        ids, tokenizer = ids[ids >= 0], self.model.tokenizer
        ends = among(ids, self.model.eos_token_ids).nonzero()
        kept = ids[: int(ends[0])] if len(ends) else ids
        text = None if tokenizer is None else str(tokenizer.decode(kept.tolist(), skip_special_tokens=False))
        return Answer(text, bool(len(ends)), len(kept), masks)

    def _track(self, trajectory: Trajectory) -> SinkTrack | None:
        if self._recorder is None or trajectory.steps_run == 0:
            return None
        left = trajectory.canvas[:, -1].numpy()
        self.describe(left, unmask_step=trajectory.unmask_step.numpy(), final_id=left)
        data = self._recorder.store.dataset()
        return None if data is None else SinkTrack(data)

    def before(self, step: int, state: State) -> None:
        """Begin recording a step."""
        if self._recorder is not None:
            self._recorder.begin_step(step)

    def after(self, step: int, state: State) -> None:
        """Pass the step that just ended to the recorder.

        Raises:
            HookOrderError: a hook function is at a point of the sampler, given by name, that the first step did not
                pass, so it would never be called.
        """
        for name in self._named - set(self.settings.later_points) if step == 0 else ():
            point = self.model.tree.hook_dict[name]
            if isinstance(point, SamplerPoint) and point.reached != 0:
                raise HookOrderError(never_passed(name, self.settings.name))
        self._report(step + 1, self.settings.most_steps)
        self.sums.end_step()
        self.controls.end_step(state.active)
        if self._recorder is None:
            return
        canvases = step_canvases(state.step_canvas, state.undecided_before(), state.undecided_after(), state.active)
        for choice in self._choices:
            choice.end_step(step, canvases["active"])
        self.describe(canvases["token_id"])  # first, because a step is readable as soon as it is in the store
        self._recorder.end_step(step, canvases | recorded(state.keys) | of_pass(self.model.tree, self.rows))

    @property
    def latest(self) -> dict[str, np.ndarray]:
        """The variables that the step that ended last recorded, such as ``score`` [batch, layer, head, pos]."""
        return {} if self._recorder is None else self._recorder.latest

    def describe(self, canvas: np.ndarray, **run_arrays: np.ndarray) -> None:
        """Write the run's provenance and the text of all tokens so far to the recorder's store, if anything is new.

        Args:
            canvas: token ids that may be new.
        """
        assert self._recorder is not None
        self._texts(set(canvas.ravel().tolist()))
        if self._described == len(self._vocabulary) and not run_arrays:
            return
        self._described = len(self._vocabulary)
        words = {"vocabulary": json.dumps(self._vocabulary), "special": json.dumps(self.model.special_tokens)}
        real = self.state.real.cpu().numpy()
        varies = self.model.tree.changes_attention and not self.settings.left_to_right
        about = {
            "model": self.model.name,
            "revision": self.model.checkpoint.revision or "",
            "family": self.model.family,
            "causal": int(self.settings.left_to_right),
            "block_length": self.settings.positions_per_block if varies else self.model.block_length or 0,
            "attention": normalizer_name(self.model.config),
            "sampler": self.settings.name,
            "settings": self._settings_text(),
            "seed": self.request.seed,
            "prompt_length": self.state.prompt_length,
            "dtype": str(self.model.cfg.dtype),
            "device": str(self.model.cfg.device),
            "versions": json.dumps(versions("torch", "transformers", "nnsight")),
        }
        if isinstance(self.state.keys, PolicyCache):
            about["cache"] = repr(self.state.keys.policy)
        self._recorder.store.describe(about | words, {"is_real": real, **run_arrays})
