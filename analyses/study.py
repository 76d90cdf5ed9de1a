"""What all studies share: prompts in, measured runs, intervals over prompts, tables, figures and a manifest out.

A study is one file with one subclass of `Study`. It says what to measure on a batch of prompts (a Dataset with the axis
``prompt``), and which tables and figures come of the measurements of all models. `Study.run` does the rest: it goes
through models and prompts in batches, keeps what each batch gave in ``parts/`` so that an interrupted study goes on
where it stopped, and writes the results:

    NAME-TABLE.csv, NAME.nc (every prompt's measurements), NAME-FIGURE.png and .svg, NAME.json (the manifest)

Figures that show one run take an *example*: the run of one prompt, which every model gives once more. Intervals are
over prompts (intervals.py), and each prompt's steps are its own, whatever its batch (runs.py).

One way this fails: all models are in memory at once. Where they do not fit together, give each a study of its own.
"""

import hashlib
import inspect
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xarray as xr
from torch import Tensor

import sinklens
from sinklens.analyses.intervals import RESAMPLES
from sinklens.analyses.runs import OwnRun, own_run
from sinklens.atomic import whole
from sinklens.errors import SettingError, SinklensError, nearest
from sinklens.sampling.settings import BY_SAMPLER, make_settings
from sinklens.tasks.word_problems import held_out
from sinklens.versions import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from sinklens.model import Model

SINK = "a sink: column sum more than 3 above the mean of the others"  # said on figures; what `SinkTrack.detect` finds


@dataclass(frozen=True)
class Findings:
    """What a study gives.

    Attributes:
        measured: model name -> every prompt's measurements, with the axis ``prompt``.
        examples: model name -> what the figures show of one prompt's run, for the studies and models that have it.
        tables: name -> table.
        manifest: all that decided the numbers.
        files: what was written; empty without a folder.
    """

    measured: dict[str, xr.Dataset]
    examples: dict[str, xr.Dataset]
    tables: "dict[str, DataFrame]"
    manifest: dict[str, Any]
    files: tuple[Path, ...] = ()


@dataclass
class Study(ABC):
    """One question, asked of several models on the same prompts.

    Attributes:
        seed: of the runs and of the bootstrap.
        batch: prompts per run; the results do not depend on it.
        settings: sampler settings; a model takes those that its sampler knows.
        chat_template: as in `sinklens.generate`.
        shown: number of the prompt whose run the figures show.

    Raises:
        SettingError: `batch` is below 1.
    """

    name: ClassVar[str]
    seed: int = 0
    batch: int = 10
    settings: dict[str, Any] = field(default_factory=dict)
    chat_template: bool | str = False
    shown: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise SettingError(f"batch is the number of prompts per run, at least 1; got {self.batch}.")

    @abstractmethod
    def measure(self, model: "Model", prompts: Sequence[Any], settings: Mapping[str, Any]) -> xr.Dataset:
        """Measurements of some prompts, with the axis ``prompt``."""

    def example(self, model: "Model", prompt: Any, settings: Mapping[str, Any]) -> xr.Dataset | None:
        """What `figures` shows of one prompt's run; None if that is nothing."""
        return None

    @abstractmethod
    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """Tables by name."""

    @abstractmethod
    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """Figures by name."""

    def begin(self, models: Sequence[str], prompts: Sequence[Any]) -> None:  # noqa: B027 — may be left as it is
        """Called by `run` before anything is measured, to refuse what the study cannot measure, or to forget what an
        earlier run left. Does nothing by default.

        Args:
            models: their names.
            prompts: each a text or a list of token ids.
        """

    def generate(self, model: "Model", prompts: Sequence[Any], settings: Mapping[str, Any], **more: Any) -> OwnRun:
        """`own_run` with the study's seed and chat template."""
        return own_run(model, prompts, settings, seed=self.seed, chat_template=self.chat_template, **more)

    def run(
        self,
        models: Any,
        prompts: str | Sequence[Any] | Tensor | None = None,
        out: str | Path | None = None,
        progress: bool | None = None,
    ) -> Findings:
        """Ask the models.

        Args:
            models: what `sinklens.load` takes, one or several.
            prompts: texts, or rows of token ids for a model without a tokenizer; one text, or one row of ids, is one
                prompt. By default the first 100 shipped held-out problems.
            out: folder for the results; what an interrupted run with the same manifest has measured there is kept.
            progress: show a progress bar; by default on a terminal.

        Raises:
            SettingError: no model, no prompt, two models of one name, a setting that no model knows, no prompt of the
                number `shown`, or what `begin` refuses.

        Warns:
            UserWarning: `out` holds results of other models, prompts or options, which will be replaced.
        """
        if prompts is None:
            prompts = [problem.prompt for problem in held_out(100)]
        prompts = _prompts(prompts)
        loaded = [sinklens.load(model) for model in _several(models)]
        names = _names(loaded)
        if not names or not prompts:
            raise SettingError("a study needs at least one model and one prompt.")
        if not 0 <= self.shown < len(prompts):
            raise SettingError(f"shown is the number of a prompt, 0 to {len(prompts) - 1}; got {self.shown}.")
        given = _settings_of(loaded, self.settings)
        self.begin(names, prompts)
        manifest = self._manifest(loaded, names, prompts, given)
        folder = None if out is None else _folder(Path(out), self.name, manifest)
        if out is not None:
            _warn_of_others(Path(out) / f"{self.name}.json", manifest)
        measured, examples = {}, {}
        for name, model, settings in zip(names, loaded, given, strict=True):
            parts = self._parts(model, prompts, settings, folder, name, progress)
            measured[name] = xr.concat(list(parts), dim="prompt", join="outer").drop_encoding()
            example = self.example(model, prompts[self.shown], settings)
            if example is not None:
                examples[name] = example
        findings = Findings(measured, examples, self.tables(measured), manifest)
        return findings if out is None else _write(self, findings, Path(out))

    def _parts(
        self,
        model: "Model",
        prompts: Sequence[Any],
        settings: Mapping[str, Any],
        folder: Path | None,
        name: str,
        progress: bool | None,
    ) -> Iterator[xr.Dataset]:
        """Measurements batch by batch; those that an interrupted run left are read."""
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import track

        console = Console(stderr=True)
        starts = range(0, len(prompts), self.batch)
        shown = console.is_terminal if progress is None else progress
        for start in track(starts, escape(f"{self.name}: {name}"), console=console, disable=not shown, transient=True):
            part = None if folder is None else folder / f"{hashlib.sha256(name.encode()).hexdigest()[:8]}-{start}.nc"
            if part is not None and part.exists():
                yield xr.load_dataset(part, engine="h5netcdf")
                continue
            found = self.measure(model, prompts[start : start + self.batch], settings)
            if part is not None:
                with whole(part) as file:
                    file.write_bytes(found.to_netcdf(engine="h5netcdf"))
            yield found

    def _manifest(
        self,
        models: Sequence["Model"],
        names: Sequence[str],
        prompts: Sequence[Any],
        settings: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        options = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "settings"}
        return {
            "study": self.name,
            "source": _source_hash(type(self)),
            "options": json.loads(json.dumps(options, default=repr)),
            "models": [
                {
                    "name": name,
                    "revision": model.checkpoint.revision,
                    "family": model.family,
                    "weights": model.fingerprint,
                    "dtype": str(model.cfg.dtype),
                    "device": str(model.cfg.device),
                    "settings": asdict(make_settings(model.record.sampler, dict(given), model.checkpoint.defaults)),
                }
                for name, model, given in zip(names, models, settings, strict=True)
            ],
            "prompts": len(prompts),
            "prompts_sha256": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
            "resamples": RESAMPLES,
            "versions": versions("sinklens", "torch", "transformers", "nnsight", "numpy"),
        }


def read_prompts(path: Path, limit: int | None = None) -> list[Any]:
    """Prompts from a file: JSON Lines with a ``prompt`` or ``question``, or else one prompt per non-empty line.

    A prompt of JSON Lines is a text, or a list of token ids. Lines end at a line feed and at nothing else.

    Raises:
        SinklensError: the file cannot be read, or holds no prompt.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SinklensError(f"could not read prompts from {path}: {error}") from error
    lines = enumerate((line.removesuffix("\r") for line in content.split("\n")), 1)
    written = [(f"{path}, line {number}", line) for number, line in lines if line.strip()]
    if not written:
        raise SinklensError(f"{path} holds no prompt; write one per line, or JSON Lines with a 'prompt' in each.")
    return [_prompt_of(line, where) if path.suffix == ".jsonl" else line for where, line in written[:limit]]


def _prompt_of(line: str, where: str) -> str | list[int]:
    try:
        entry = json.loads(line)
        found = entry["prompt"] if "prompt" in entry else entry["question"]
    except (ValueError, KeyError, TypeError) as error:
        raise SinklensError(f"{where}: no JSON object with a 'prompt' or a 'question' ({error}).") from error
    if isinstance(found, str) or (isinstance(found, list) and found and all(type(token) is int for token in found)):
        return found
    raise SinklensError(
        f"{where}: the prompt is {json.dumps(found)}; give a text, or a list of token ids such as [2, 287, 28]."
    )


def _prompts(given: str | Sequence[Any] | Tensor) -> list[Any]:
    """Every prompt as a text or a list of token ids; one text, or one row of ids, is one prompt."""
    if isinstance(given, str):
        return [given]
    listed = [prompt if isinstance(prompt, str) else torch.as_tensor(prompt).tolist() for prompt in given]
    return [listed] if listed and all(isinstance(prompt, int) for prompt in listed) else listed


def _several(models: Any) -> list[Any]:
    from sinklens.model import Model

    return [models] if isinstance(models, str | Path | Model | torch.nn.Module) else list(models)


def _names(models: Sequence["Model"]) -> list[str]:
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise SettingError(f"each model is asked once; got {', '.join(names)}.")
    return names


def _settings_of(models: Sequence["Model"], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each model, the settings that its sampler knows; one that no model knows is an error."""
    known = [{entry.name for entry in fields(BY_SAMPLER[model.record.sampler])} for model in models]
    every = sorted(set().union(*known))
    for name in settings:
        if name not in every:
            raise SettingError(f"none of these models has a setting {name!r}.{nearest(name, every)}")
    return [{name: value for name, value in settings.items() if name in names} for names in known]


def _source_hash(study: type) -> str:
    """Tells two versions of a study's file apart: one that was edited does not go on with the other's parts."""
    text = ""
    try:
        text = inspect.getsource(inspect.getmodule(study) or study)
    except (OSError, TypeError):  # made in a notebook, whose cells have sources, or in a console, which has none
        for method in filter(inspect.isfunction, vars(study).values()):
            with suppress(OSError):  # a dataclass has methods that were written by none
                text += inspect.getsource(method)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def _folder(out: Path, name: str, manifest: Mapping[str, Any]) -> Path:
    """Where the parts of exactly this study are kept until it is finished."""
    return out / "parts" / f"{name}-{hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]}"


def _warn_of_others(file: Path, manifest: Mapping[str, Any]) -> None:
    """Say, before anything is measured, that the results told of by the manifest `file` will be replaced."""
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        told = f"{', '.join(model['name'] for model in before['models'])}; prompts: {before['prompts']}"
        dict.keys(before["options"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # none, or none of a study
    made, now = (
        {**one, "options": {**one["options"], "batch": 0}} for one in (before, json.loads(json.dumps(manifest)))
    )
    if any(made.get(key) != now[key] for key in ("options", "models", "prompts_sha256")):
        warnings.warn(
            f"{file.parent} holds another run of this study ({told}), which this one will replace; to keep it, "
            f"interrupt now and give another folder.",
            stacklevel=3,
        )


def _write(study: Study, findings: Findings, out: Path) -> Findings:
    import shutil

    files = []
    for name, table in findings.tables.items():
        files.append(out / f"{study.name}-{name}.csv")
        with whole(files[-1]) as part:
            table.to_csv(part, index=False)
    files += _draw(study, findings, out)
    stacked = xr.concat(list(findings.measured.values()), dim="model", join="outer", combine_attrs="drop_conflicts")
    files.append(out / f"{study.name}.nc")
    with whole(files[-1]) as part:
        part.write_bytes(stacked.assign_coords(model=list(findings.measured)).to_netcdf(engine="h5netcdf"))
    files.append(out / f"{study.name}.json")
    with whole(files[-1]) as part:
        part.write_text(json.dumps(findings.manifest, indent=1, sort_keys=True) + "\n")
    folder = _folder(out, study.name, findings.manifest)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # there are parts of other studies in it
        folder.parent.rmdir()
    return replace(findings, files=tuple(files))


def _draw(study: Study, findings: Findings, out: Path) -> list[Path]:
    """Every figure as PNG and SVG; the same numbers give the same bytes."""
    from matplotlib import pyplot

    files = []
    with pyplot.rc_context({"svg.hashsalt": "sinklens"}):  # else names inside an SVG are random
        for name, figure in study.figures(findings.measured, findings.examples).items():
            for kind in ("png", "svg"):
                files.append(out / f"{study.name}-{name}.{kind}")
                with whole(files[-1]) as part:
                    figure.savefig(part, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                figure.set_layout_engine("none")  # the places it found hold for the next format too
            pyplot.close(figure)
    return files
