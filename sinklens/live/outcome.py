"""The result of a run as arrays, the form in which the lab keeps runs, shows them and writes them to disk."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from sinklens.families.registry import find_sampler
from sinklens.hooks.forward_pass import MODES, PassKind
from sinklens.live.chips import is_index
from sinklens.live.refusal import Refused, require
from sinklens.model import Model
from sinklens.runs import Answer, Generation
from sinklens.sampling import as_policy
from sinklens.sinks import SinkTrack, build_track

ARRAYS = ("canvas", "undecided", "committed", "unmask_step", "real", "score")
LARGE = 64_000_000  # bytes of scores above which they are kept in float16


@dataclass(frozen=True)
class RunOutcome:
    """What the lab keeps of a run: canvases, decisions, sink scores and the answer.

    Attributes:
        canvas: the ids that each step worked on, and those after the last, [step + 1, pos]; -1 where an autoregressive
            run has not arrived.
        undecided: the undecided positions of each canvas, [step + 1, pos].
        committed: the positions that each step decided, [step, pos].
        unmask_step: the step that decided each position, [pos].
        real: False on padding, [pos].
        score: sink scores, [step, layer, head, pos]; NaN where a key has no score.
        prompt_length: positions before the answer.
        answer: the answer.
        sampler, settings: the sampler and its settings, with defaults filled in.
        attrs: attributes of the sink track: the run's provenance, and the text of its tokens.
        time: the noise level that the network read in each step; None for a network that reads none.
        kinds: the kind of each step's pass, in a model that changes its attention; empty for others.
    """

    canvas: Int[np.ndarray, "frame pos"]
    undecided: Bool[np.ndarray, "frame pos"]
    committed: Bool[np.ndarray, "step pos"]
    unmask_step: Int[np.ndarray, " pos"]
    real: Bool[np.ndarray, " pos"]
    score: Float[np.ndarray, "step layer head pos"]
    prompt_length: int
    answer: Answer
    sampler: str
    settings: Mapping[str, Any]
    attrs: Mapping[str, Any]
    time: Sequence[float] | None = None
    kinds: tuple[PassKind, ...] = ()

    @classmethod
    def of(cls, run: Generation) -> "RunOutcome":
        """The outcome of a run of one prompt with at least one step."""
        assert run.sinks is not None, "a run of the lab records its sinks"
        score = run.sinks.data["score"].to_numpy()[0]
        return cls(
            canvas=run.canvas[0].numpy(),
            undecided=run.undecided[0].numpy(),
            committed=run.sinks.data["committed"].to_numpy()[0],
            unmask_step=run.unmask_step[0].numpy(),
            real=run.real[0].numpy(),
            score=score.astype(np.float16) if score.nbytes > LARGE else score,
            prompt_length=run.prompt_length,
            answer=run.answers[0],
            sampler=run.settings.name,
            settings=asdict(run.settings),
            attrs={
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in run.sinks.data.attrs.items()
            },
            time=None if run.time is None else run.time[0].tolist(),
            kinds=run.kinds if run.model.tree.changes_attention else (),
        )

    @property
    def steps(self) -> int:
        """Number of steps that ran."""
        return len(self.canvas) - 1

    @property
    def vocabulary(self) -> dict[int, str]:
        """Text of every token of the run."""
        return {int(token): text for token, text in json.loads(self.attrs.get("vocabulary", "{}")).items()}

    def track(self) -> SinkTrack:
        """The sink track of the run."""
        found = build_track(
            self.score[None].astype(np.float32),
            self.canvas[None, :-1].astype(np.int32),
            self.undecided[None, :-1],
            self.committed[None],
            self.real[None],
            self.unmask_step[None],
            dict(self.attrs),
        )
        data = found.data.assign(
            final_id=(("batch", "pos"), self.canvas[None, -1].astype(np.int64)),
            active=(("batch", "step"), np.ones((1, self.steps), dtype=bool)),  # a row alone never waits
        )
        if not self.kinds:
            return SinkTrack(data)
        modes = [-1 if kind.mode is None else MODES.index(kind.mode) for kind in self.kinds]
        starts = [-1 if kind.block is None else kind.block.start for kind in self.kinds]
        values = {"mode": np.array([modes], dtype=np.int8), "block_start": np.array([starts], dtype=np.int32)}
        return SinkTrack(data.assign({name: (("batch", "step"), value) for name, value in values.items()}))

    def generation(self, model: "Model", cache: str | None) -> Generation:
        """The run as `sinklens.generate` returned it under the cache policy of this name."""
        kind = find_sampler(self.sampler)
        made = {entry.name: self.settings[entry.name] for entry in fields(kind) if entry.init}
        return Generation(
            canvas=torch.from_numpy(self.canvas.copy())[None],
            undecided=torch.from_numpy(self.undecided.copy())[None],
            unmask_step=torch.from_numpy(self.unmask_step.copy())[None],
            active=torch.ones(1, self.steps, dtype=torch.bool),
            real=torch.from_numpy(self.real.copy())[None],
            prompt_length=self.prompt_length,
            answers=(self.answer,),
            settings=kind(**made),
            seed=int(self.attrs["seed"]),
            sinks=self.track(),
            single=True,
            model=model,
            cache=as_policy(cache),
            time=None if self.time is None else torch.tensor([self.time]),
            kinds=self.kinds,
            ties=None,
        )

    def record(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON."""
        plain = {"prompt_length": self.prompt_length, "sampler": self.sampler, "settings": dict(self.settings)}
        time = None if self.time is None else list(self.time)
        kinds = [
            [
                kind.mode,
                None if kind.segments is None else [[one.start, one.stop] for one in kind.segments],
                kind.adapted,
            ]
            for kind in self.kinds
        ]
        return plain | {"answer": asdict(self.answer), "attrs": dict(self.attrs), "time": time, "kinds": kinds}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> "RunOutcome":
        """The outcome with this record and these arrays, which may be damaged or forged.

        Raises:
            Refused: the record and the arrays do not match.
        """
        _check(record, arrays)
        parts: dict[str, Any] = {name: arrays[name] for name in ARRAYS}
        parts |= {name: record[name] for name in ("prompt_length", "sampler", "settings", "attrs")}
        kinds = _kinds(record.get("kinds", []), len(arrays["canvas"]) - 1, arrays["canvas"].shape[1])
        return cls(answer=Answer(**record["answer"]), time=record.get("time"), kinds=kinds, **parts)


def _kinds(given: Any, steps: int, pos: int) -> tuple[PassKind, ...]:
    """The passes of a record, over at most `pos` columns."""
    text = "its passes are not one for each step."
    try:
        found = tuple(
            PassKind(mode, None if segments is None else tuple(range(start, stop) for start, stop in segments), adapted)
            for mode, segments, adapted in given
        )
    except (TypeError, ValueError) as error:
        raise Refused(text) from error
    spans = [span for kind in found for span in kind.segments or ()]
    known = all(kind.mode in (None, *MODES) and isinstance(kind.adapted, bool) for kind in found)
    fits = known and all(0 <= span.start <= span.stop <= pos for span in spans)
    require(fits and len(found) in (0, steps), text)
    return found


def _check(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays of other kinds or shapes than a run has, and a record of other types."""
    frames, pos = arrays["canvas"].shape
    shapes = {
        "canvas": ("i", (frames, pos)), "undecided": ("b", (frames, pos)), "committed": ("b", (frames - 1, pos)),
        "unmask_step": ("i", (pos,)), "real": ("b", (pos,)),
        "score": ("f", (frames - 1, *arrays["score"].shape[1:3], pos)),
    }  # fmt: skip
    for name, (kind, shape) in shapes.items():
        array = arrays[name]
        fits = (array.dtype.kind, array.shape) == (kind, shape) and array.dtype.isnative
        require(fits, f"its array {name} has another type or shape.")
    require(is_index(record["prompt_length"]) and record["prompt_length"] <= pos, "its prompt length is wrong.")
    require(
        all(isinstance(record[name], dict) for name in ("settings", "attrs", "answer")), "its record is incomplete."
    )
    require(isinstance(record["sampler"], str), "its sampler is not a name.")
    time = record.get("time")
    numbers = isinstance(time, list) and len(time) == frames - 1 and all(type(number) is float for number in time)
    require(time is None or numbers, "its noise levels are not one number for each step.")
    words = json.loads(record["attrs"].get("vocabulary", "{}"))
    require(all(token.lstrip("-").isdigit() for token in words), "its vocabulary is not one of token ids.")
    types = {"text": (str, type(None)), "ended": (bool,), "tokens": (int,), "masks": (int,)}
    answer = record["answer"]
    require(all(type(answer.get(name)) in allowed for name, allowed in types.items()), "its answer is incomplete.")
