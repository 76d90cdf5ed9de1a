"""Runs made elsewhere: their canvases are read from a file, and a model runs over them with all hook points.

A fast engine, or another library, can store which tokens were on the canvas at every step. `replay` runs a model over
these canvases, so everything that sinklens reads or changes in a run of its own is there too. The format is JSON Lines,
one object per run (that is, per row of a batch):

    format       "canvases 1"
    prompt_ids   token ids of the prompt, without padding
    canvas       the ids that entered each step, and those after the last: [steps + 1][positions], prompt first
    undecided    positions that are undecided in each canvas: [steps + 1][…]; or
    mask_id      the id on undecided positions (-1 in an autoregressive run), from which `undecided` follows
    sampler, settings, seed      optional: those of the run, under the names of sinklens
    model, source                optional: the model's name, and what made the run

Positions count from the first token of the prompt. One of `undecided` and `mask_id` is needed; with both, `undecided`
counts. `write_canvases` writes runs of sinklens, `read_canvases` reads a file, `from_history` takes the lists of
canvases that Dream's ``diffusion_generate(output_history=True, return_dict_in_generate=True)`` and dLLM's samplers
(``return_dict=True``) return.

Pitfall: the canvases alone do not say how an engine computed its steps. With approximate caches, quantization or
another attention kernel its activations differed from those of a replay, which are those of the exact model.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from sinklens.errors import CheckpointError, SettingError, require
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import sampler_name
from sinklens.model import Model, load
from sinklens.runs.request import Hooks, RunRequest
from sinklens.runs.result import Generation
from sinklens.runs.session import generate
from sinklens.runs.start import start
from sinklens.utils.arguments import Seed, Words, as_tuple, checked, read_as
from sinklens.utils.atomic import write_file
from sinklens.utils.documents import parse_json, read_text
from sinklens.utils.integers import as_integer
from sinklens.utils.progress import Progress

FORMAT = "canvases 1"
MOST_CANVASES = 2**30  # bytes of a file


@dataclass(frozen=True, eq=False)
class RecordedCanvases:
    """The canvases of one run of one prompt.

    Attributes:
        prompt_ids: the prompt, without padding.
        canvas: the ids that entered each step, and those after the last.
        undecided: which of them are undecided.
        sampler, settings: those of the run, if they are known; "" and empty otherwise.
        seed: the seed of the run.
        model, source: the model's name, and what made the run; "" if the file does not say.

    Raises:
        SettingError: canvases that are not one run of this prompt.
    """

    prompt_ids: list[int]
    canvas: Int[Tensor, "step pos"]
    undecided: Bool[Tensor, "step pos"]
    sampler: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    model: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        length = len(self.prompt_ids)
        require(
            self.canvas.ndim == 2 and self.canvas.shape == self.undecided.shape and len(self.canvas) >= 2,
            f"a recorded run has at least two canvases [steps + 1, positions], and as many undecided flags; got "
            f"{list(self.canvas.shape)} and {list(self.undecided.shape)}.",
        )
        require(
            length < self.canvas.shape[1] and self.canvas[0, :length].tolist() == list(self.prompt_ids),
            "the first canvas must begin with prompt_ids, and have positions after them.",
        )
        require(
            self.undecided[0, length:].any() and not self.undecided[0, :length].any(),
            "the first canvas must have undecided positions, all of them after the prompt.",
        )

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.canvas) - 1

    @property
    def gen_length(self) -> int:
        """Number of positions after the prompt."""
        return self.canvas.shape[1] - len(self.prompt_ids)

    def to_json(self) -> dict[str, Any]:
        """The object of the module's format."""
        return {
            "format": FORMAT,
            "prompt_ids": list(self.prompt_ids),
            "canvas": self.canvas.tolist(),
            "undecided": [row.nonzero()[:, 0].tolist() for row in self.undecided],
            "sampler": self.sampler,
            "settings": dict(self.settings),
            "seed": self.seed,
            "model": self.model,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, data: Any) -> "RecordedCanvases":
        """Read an object of the module's format.

        Raises:
            CheckpointError: a key is missing, or its value has another form.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            given = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise CheckpointError(f"a recorded run is an object with format {FORMAT!r}; got {given!r}.")
        kinds = {"sampler": str, "settings": dict, "seed": Seed, "model": str, "source": str}
        try:
            about = {key: read_as(kind, key, data[key]) for key, kind in kinds.items() if data.get(key) is not None}
            canvas = torch.tensor([_integers("canvas", row) for row in read_as(list, "canvas", data["canvas"])])
            return cls(_integers("prompt_ids", data["prompt_ids"]), canvas, _undecided(data, canvas), **about)
        except (KeyError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"a recorded run lacks a key or has one of another form: {type(error).__name__} {error}."
            ) from error


def _integers(key: str, given: Any) -> list[int]:
    valid = isinstance(given, list) and all(type(number) is int for number in given)
    require(valid, f"{key} must hold integers in lists; got {given!r:.80}.")
    return given


def _undecided(data: Mapping[str, Any], canvas: Int[Tensor, "step pos"]) -> Bool[Tensor, "step pos"]:
    """Which positions are undecided, from the first key that says so."""
    if data.get("undecided") is None:
        return canvas == read_as(int, "mask_id", data["mask_id"])
    found = torch.zeros_like(canvas, dtype=torch.bool)
    for row, places in zip(found, read_as(list, "undecided", data["undecided"]), strict=True):
        row[[read_as(Annotated[int, Ge(0)], "a position", place) for place in _integers("undecided", places)]] = True
    return found


@checked
def recorded_canvases(run: Generation, source: str = "sinklens") -> list[RecordedCanvases]:
    """The rows of a run, without padding; a row ends with the last step that worked on it.

    Raises:
        SettingError: not a run, or one of its rows was never worked on.
    """
    chosen = run.settings
    settings = {name: getattr(chosen, name) for name in chosen.settings() if getattr(chosen, name) is not None}
    settings = {name: value for name, value in settings.items() if isinstance(value, str | int | float | bool)}
    found = []
    for row, real in enumerate(run.real):
        active = run.active[row].nonzero()[:, 0] if run.active.shape[1] else torch.arange(run.steps_run)
        require(len(active), f"no step worked on row {row}; leave it out.")
        canvas = run.canvas[row, : int(active[-1]) + 2, real]
        undecided = run.undecided[row, : int(active[-1]) + 2, real]
        prompt = canvas[0, : int(real[: run.prompt_length].sum())].tolist()
        found.append(
            RecordedCanvases(prompt, canvas, undecided, chosen.name, settings, run.seed, run.model.name, source)
        )
    return found


@checked
def write_canvases(
    runs: Generation | RecordedCanvases | Iterable[Generation | RecordedCanvases], path: str | Path
) -> None:
    """Write one run or several as JSON Lines (see the module); each row of a batch becomes a line."""
    parts = [[run] if isinstance(run, RecordedCanvases) else recorded_canvases(run) for run in as_tuple(runs)]
    write_file(path, "".join(json.dumps(one.to_json()) + "\n" for rows in parts for one in rows))


@checked
def read_canvases(path: str | Path) -> list[RecordedCanvases]:
    """Read the runs of a file in the format of this module.

    Raises:
        CheckpointError: the file does not exist, or a line is not a recorded run; the message names the line.
    """
    found = []
    for number, line in enumerate(read_text(Path(path), most=MOST_CANVASES).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            parsed = parse_json(line, where)
            try:
                found.append(RecordedCanvases.from_json(parsed))
            except (CheckpointError, SettingError) as error:
                raise CheckpointError(f"{where}: {error}") from error
    return found


@checked
def from_history(
    history: Iterable[Int[Tensor, "*batch _"]],
    prompts: Iterable[int | Sequence[int]],
    mask_id: int,
    *,
    has_start: bool,
    padding_side: Literal["left", "right"] = "left",
    source: str = "",
) -> list[RecordedCanvases]:
    """Recorded runs from the canvases of a batch, one tensor per step.

    ==========================================  =========  ============
    source                                      has_start  padding_side
    ==========================================  =========  ============
    ``output.history`` of Dream                 False      "left"
    ``output.histories`` of dLLM, MDLMSampler   True       "right"
    ``output.histories`` of dLLM, BD3LMSampler  True       "left"
    ==========================================  =========  ============

    Canvases that grow by blocks, as those of BD3LMSampler, get undecided positions up to the length of the last one.
    Padding that completes the prompts' first block is recognized with the help of `prompts`.

    Args:
        history: the canvases, in the order of the steps; [pos] for a single prompt.
        prompts: token ids of each row's prompt, without padding; those of a single prompt need no list around them.
        mask_id: the mask token.
        has_start: whether the first canvas is the one before the first step, or the one after it. The canvases alone do
            not show which, since a step may decide nothing.
        padding_side: where shorter rows are padded.
        source: what made the run.

    Raises:
        SettingError: no canvases, canvases that shrink, or a row does not hold its prompt.
    """
    listed: Any = list(prompts)
    steps = [torch.atleast_2d(canvas) for canvas in history]
    single = all(as_integer(one) is not None for one in listed)
    rows = [[int(token) for token in prompt] for prompt in ([listed] if single else listed)]
    require(
        steps and len(steps[0]) == len(rows),
        f"history must hold canvases [batch, pos], one for each step, of {len(rows)} prompts; got {len(steps)} canvases"
        f"{f' of {len(steps[0])} rows' if steps else ''}.",
    )
    widths = [canvas.shape[1] for canvas in steps]
    require(
        widths == sorted(widths),
        f"canvases of one run may grow by blocks, but not shrink; their lengths are {widths}.",
    )
    canvases = torch.stack(
        [pad(one.detach().cpu().long(), (0, widths[-1] - one.shape[1]), value=mask_id) for one in steps], dim=1
    )
    end = longest = max(map(len, rows))
    if padding_side == "left":
        first, grows = canvases[:, 0].tolist(), has_start and widths[0] < widths[-1]
        ends = [*([widths[0]] if grows else ()), *range(longest, widths[-1])]  # a block of padding may come first
        begun = list(zip(first, rows, strict=True))
        end = next((at for at in ends if all(row[at - len(ids) : at] == ids for row, ids in begun)), longest)
    found = []
    for row, prompt in zip(canvases, rows, strict=True):
        begin = end - len(prompt) if padding_side == "left" else 0
        canvas = row[:, begin : begin + len(prompt) + widths[-1] - end]
        if not has_start:
            first = canvas[:1].clone()
            first[:, len(prompt) :] = mask_id
            canvas = torch.cat([first, canvas])
        found.append(RecordedCanvases(prompt, canvas, canvas == mask_id, source=source))
    return found


@checked
def replay(
    model: Any,
    recorded: Annotated[
        RecordedCanvases,
        Words(
            "one recorded run, such as read_canvases(path)[0] (sinklens.generate(model, prompts, replay=run) replays "
            "a run of sinklens itself)"
        ),
    ],
    *,
    hooks: Hooks = (),
    record_sinks: Any = True,
    progress: Progress = None,
    **settings: Any,
) -> Generation:
    """Run a model over the canvases of a recorded run, with the points, hooks and interventions of `generate`.

    Args:
        model: a `Model`, or anything `sinklens.load` accepts.
        recorded: one run, from `read_canvases` or one of the readers.
        hooks, record_sinks, progress: as in `sinklens.generate`.
        **settings: settings of the sampler, which replace those that the file holds. Without any, the family's sampler
            runs with as many steps as the recorded run, in one block.

    Raises:
        SettingError: not a recorded run, or the sampler cannot run over these canvases; the message says why.
        PromptError: token ids that the model does not have.
    """
    model = load(model)
    given = _settings(model, recorded, settings)
    shared = {"seed": recorded.seed, "record_sinks": record_sinks, "progress": progress, "hooks": hooks}
    placed = _placed(start(model, RunRequest([recorded.prompt_ids], **shared, settings=given))[1], recorded)
    return generate(model, [recorded.prompt_ids], replay=placed, **shared, **given)


def _settings(model: Model, recorded: RecordedCanvases, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the replaying run."""
    if recorded.sampler and "sampler" not in given and "mode" not in given:
        return {"sampler": recorded.sampler, **recorded.settings, **given}
    names = find_sampler(sampler_name(model.family_record, given)).settings()
    shape = {"gen_length": recorded.gen_length, "steps": recorded.steps, "block_length": recorded.gen_length}
    if model.family_record.block_causal:  # blocks are the model's, and their passes are those of the recorded run
        length = model.checkpoint.blocks.length
        shape |= {"steps": -(-recorded.gen_length // length) * length, "block_length": length, "stop": False}
    return {name: value for name, value in shape.items() if name in names} | dict(given)


def _placed(state: Any, recorded: RecordedCanvases) -> SimpleNamespace:
    """The recorded canvases in the columns of a run, which may have padding for its blocks."""
    real, size = state.real[0].cpu(), recorded.canvas.shape[1]
    require(
        int(real.sum()) == size,
        f"the recorded run has {size} positions, {recorded.gen_length} of them after the prompt, and this run "
        f"{int(real.sum())}; pass gen_length={recorded.gen_length}, or a sampler whose canvas has this length.",
    )
    canvas = state.canvas[:1].cpu().repeat(len(recorded.canvas), 1)
    undecided = torch.zeros_like(canvas, dtype=torch.bool)
    shown = recorded.canvas.masked_fill(recorded.undecided, state.mask_id) if state.mask_id >= 0 else recorded.canvas
    canvas[:, real], undecided[:, real] = shown, recorded.undecided
    return SimpleNamespace(canvas=canvas[None], undecided=undecided[None])
