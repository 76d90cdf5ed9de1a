"""What all studies share: prompts in, measured runs, intervals over prompts, tables, figures and a manifest out.

A study is one file with one subclass of `Study`. It says what to measure on a batch of prompts (a Dataset with the axis
``prompt``), and which tables and figures come of the measurements of all models. `Study.run` does the rest: it goes
through models and prompts in batches, keeps what each batch gave in ``parts/`` so that an interrupted study goes on
where it stopped, and writes the results:

    NAME-TABLE.csv, NAME.nc (every prompt's measurements), NAME-FIGURE.png and .svg, NAME.json (the manifest)

Intervals are 95 % percentile bootstrap intervals over prompts: prompts are what was sampled, not steps or heads.

One way this fails: prompts of one template resemble each other, so an interval over them says little about other text.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

import sinklens
from sinklens.errors import SettingError, SinklensError, nearest
from sinklens.sampling.settings import BY_SAMPLER, make_settings
from sinklens.tasks.word_problems import held_out
from sinklens.writing import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from sinklens.model import Model

RESAMPLES = 2000


@dataclass(frozen=True)
class Findings:
    """What a study gives.

    Attributes:
        measured: model name -> every prompt's measurements, with the axis ``prompt``.
        tables: name -> table.
        manifest: all that decided the numbers.
        files: what was written; empty without a folder.
    """

    measured: dict[str, xr.Dataset]
    tables: "dict[str, DataFrame]"
    manifest: dict[str, Any]
    files: tuple[Path, ...] = ()


@dataclass
class Study(ABC):
    """One question, asked of several models on the same prompts.

    Attributes:
        seed: of the runs and of the bootstrap.
        batch: prompts per run.
        settings: sampler settings; a model takes those that its sampler knows.
    """

    name: ClassVar[str]
    seed: int = 0
    batch: int = 10
    settings: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def measure(self, model: "Model", prompts: Sequence[str], settings: Mapping[str, Any]) -> xr.Dataset:
        """Measurements of some prompts, with the axis ``prompt``."""

    @abstractmethod
    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """Tables by name."""

    @abstractmethod
    def figures(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """Figures by name."""

    def run(
        self,
        models: Sequence[Any],
        prompts: Sequence[str] | None = None,
        out: str | Path | None = None,
        progress: bool | None = None,
    ) -> Findings:
        """Ask the models.

        Args:
            models: what `sinklens.load` takes.
            prompts: by default the first 100 shipped held-out problems.
            out: folder for the results; what an interrupted run with the same manifest has measured there is kept.
            progress: show a progress bar; by default on a terminal.

        Raises:
            SettingError: no model, no prompt, two models of one name, or a setting that no model knows.
        """
        prompts = [problem.prompt for problem in held_out(100)] if prompts is None else list(prompts)
        loaded = [sinklens.load(model) for model in models]
        names = _names(loaded)
        if not names or not prompts:
            raise SettingError("a study needs at least one model and one prompt.")
        given = _settings_of(loaded, self.settings)
        manifest = self._manifest(loaded, names, prompts, given)
        folder = None if out is None else _folder(Path(out), self.name, manifest)
        measured = {}
        for name, model, settings in zip(names, loaded, given, strict=True):
            parts = self._parts(model, prompts, settings, folder, name, progress)
            measured[name] = xr.concat(list(parts), dim="prompt", join="outer")
        findings = Findings(measured, self.tables(measured), manifest)
        return findings if out is None else _write(self, findings, Path(out))

    def _parts(
        self,
        model: "Model",
        prompts: Sequence[str],
        settings: Mapping[str, Any],
        folder: Path | None,
        name: str,
        progress: bool | None,
    ) -> Iterator[xr.Dataset]:
        """Measurements batch by batch; those that an interrupted run left are read."""
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        starts = range(0, len(prompts), self.batch)
        shown = console.is_terminal if progress is None else progress
        for start in track(starts, f"{self.name}: {name}", console=console, disable=not shown, transient=True):
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
        prompts: Sequence[str],
        settings: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        from importlib.metadata import version

        options = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "settings"}
        return {
            "study": self.name,
            "options": json.loads(json.dumps(options, default=repr)),
            "models": [
                {
                    "name": name,
                    "revision": model.checkpoint.revision,
                    "family": model.family,
                    "weights": _weights_hash(model),
                    "dtype": str(model.cfg.dtype),
                    "device": str(model.cfg.device),
                    "settings": asdict(make_settings(model.record.sampler, dict(given), model.checkpoint.defaults)),
                }
                for name, model, given in zip(names, models, settings, strict=True)
            ],
            "prompts": len(prompts),
            "prompts_sha256": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
            "resamples": RESAMPLES,
            "versions": {name: version(name) for name in ("sinklens", "torch", "transformers", "nnsight", "numpy")},
        }


def bootstrap(values: Float[np.ndarray, "prompt *rest"], seed: int = 0) -> dict[str, Any]:
    """Mean over prompts with its 95 % percentile bootstrap interval: ``mean``, ``low``, ``high``, each [*rest].

    NaN prompts are left out, entry by entry. With one prompt the interval is NaN: it cannot be told.
    """
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = _nanmean(values)
        if len(values) < 2:
            return {"mean": mean, "low": mean * np.nan, "high": mean * np.nan}
        rng = np.random.default_rng(seed)
        known = ~np.isnan(values)
        filled = np.where(known, values, 0.0)
        counts = rng.multinomial(len(values), [1 / len(values)] * len(values), size=RESAMPLES).astype(np.float64)
        total, number = (np.tensordot(counts, part, axes=1) for part in (filled, known.astype(np.float64)))
        means = total / number
    return {"mean": mean, "low": np.nanpercentile(means, 2.5, axis=0), "high": np.nanpercentile(means, 97.5, axis=0)}


def _nanmean(values: np.ndarray) -> np.ndarray:
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)


def interval_table(measured: Mapping[str, xr.Dataset], variables: Sequence[str], seed: int) -> "DataFrame":
    """One row per model, variable and place on the variable's axes behind ``prompt``: mean, low, high, prompts."""
    from pandas import DataFrame

    rows = []
    for model, data in measured.items():
        for name in variables:
            values = data[name].transpose("prompt", ...)
            found = bootstrap(values.to_numpy(), seed)
            axes = values.dims[1:]
            for place in np.ndindex(values.shape[1:]):
                labels = {
                    str(axis): data[axis].to_numpy()[at] if axis in data.coords else at
                    for axis, at in zip(axes, place, strict=True)
                }
                numbers = {key: float(np.asarray(value)[place]) for key, value in found.items()}
                rows.append({"model": model, "measure": name, **labels, **numbers, "prompts": len(values)})
    return DataFrame(rows)


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Prompts from a file: JSON Lines with a ``prompt`` or ``question``, or else one prompt per non-empty line.

    Raises:
        SinklensError: the file cannot be read, or holds no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SinklensError(f"could not read prompts from {path}: {error}") from error
    if path.suffix == ".jsonl":
        lines = [_prompt_of(line, number, path) for number, line in enumerate(lines, 1)]
    if not lines:
        raise SinklensError(f"{path} holds no prompt; write one per line, or JSON Lines with a 'prompt' in each.")
    return lines[:limit]


def _prompt_of(line: str, number: int, path: Path) -> str:
    try:
        entry = json.loads(line)
        return str(entry["prompt"] if "prompt" in entry else entry["question"])
    except (ValueError, KeyError, TypeError) as error:
        raise SinklensError(
            f"{path}, line {number}: no JSON object with a 'prompt' or a 'question' ({error})."
        ) from error


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


def _weights_hash(model: "Model") -> str:
    """Tells two checkpoints of one name apart: a hash over every tensor's name, shape and some of its values."""
    found = hashlib.sha256()
    for name, value in model.tree.hf.state_dict().items():
        some = value.flatten()[:: max(1, value.numel() // 64)][:64].to(torch.float32).cpu().numpy()
        found.update(f"{name}{tuple(value.shape)}".encode() + some.tobytes())
    return found.hexdigest()[:16]


def _folder(out: Path, name: str, manifest: Mapping[str, Any]) -> Path:
    """Where the parts of exactly this study are kept until it is finished."""
    return out / "parts" / f"{name}-{hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]}"


def _write(study: Study, findings: Findings, out: Path) -> Findings:
    import shutil

    from matplotlib import pyplot

    files = []
    for name, table in findings.tables.items():
        files.append(out / f"{study.name}-{name}.csv")
        with whole(files[-1]) as part:
            table.to_csv(part, index=False)
    for name, figure in study.figures(findings.measured).items():
        for kind in ("png", "svg"):
            files.append(out / f"{study.name}-{name}.{kind}")
            with whole(files[-1]) as part:
                figure.savefig(part, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        pyplot.close(figure)
    stacked = xr.concat(list(findings.measured.values()), dim="model", join="outer", combine_attrs="drop_conflicts")
    files.append(out / f"{study.name}.nc")
    with whole(files[-1]) as part:
        part.write_bytes(stacked.assign_coords(model=list(findings.measured)).to_netcdf(engine="h5netcdf"))
    files.append(out / f"{study.name}.json")
    with whole(files[-1]) as part:
        part.write_text(json.dumps(findings.manifest, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(_folder(out, study.name, findings.manifest), ignore_errors=True)
    return Findings(findings.measured, findings.tables, findings.manifest, tuple(files))
