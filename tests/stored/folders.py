"""Folders of reference data: a tiny checkpoint in a public file format, and what the model's own code computed from it.

Each folder holds config.json, model.safetensors, and ``expected.*`` with a single pass and stored runs. The runs are
recorded under the names of the reference code, which differ from folder to folder; runs.py translates them.

Pitfall: most checkpoints leave the mask token, and the tokens that end a run, to a tokenizer or an argument. They are
written into a copy of config.json, so a folder that loads here need not load alone. Models are kept: do not change one.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinklens.model import Model, load
from sinklens.runs import Generation, generate


class StoredRun(NamedTuple):
    """A stored run, or one row of it, as a run of sinklens.

    Attributes:
        number: which run of the folder.
        prompt: for `generate`.
        settings: for `generate`.
        canvases: the canvas that each pass of the reference worked on, [batch, pass, pos]; -1 where it is not given.
        result: what the reference returned, [batch, pos]; -1 where it is not given.
        rows: the rows of the stored tensors that are repeated; None for all.
        changes: values of config.json.
        block_length: for `load`.
        first_in_pass: positions per block if the reference decides the first token of a block outside its passes; 0 if
            it does not.
        after: whether `canvases` are those after each pass.
        modes: modes of the passes that the reference kept; none for all passes.
    """

    number: int
    prompt: Any
    settings: dict[str, Any]
    canvases: Tensor
    result: Tensor
    rows: slice | None = None
    changes: Mapping[str, Any] = {}
    block_length: int | None = None
    first_in_pass: int = 0
    after: bool = False
    modes: tuple[str, ...] = ()

    def equal(self, run: Generation) -> list[bool]:
        """Whether each canvas, in the order of passes, and then the result equal the reference's."""
        rows = self.rows or slice(None)
        canvases, result = self.canvases[rows], self.result[rows]
        steps = [step for step in range(run.steps_run) if self._is_kept(run, step)]
        if len(steps) != canvases.shape[1]:
            return [False] * (canvases.shape[1] + 1)
        found = [run.canvas[:, step + self.after] for step in steps]
        pairs = [*zip(found, canvases.unbind(1), strict=True), (run.tokens, result)]
        return [_agree(ours, theirs) for ours, theirs in pairs]

    def _is_kept(self, run: Generation, step: int) -> bool:
        if self.modes:
            return run.modes[step] in self.modes
        return not self._starts_a_block(run, step)

    def _starts_a_block(self, run: Generation, step: int) -> bool:
        decided = (run.unmask_step[0] == step).nonzero()[:, 0].tolist()
        return bool(self.first_in_pass) and len(decided) == 1 and decided[0] % self.first_in_pass == 0


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    shared = min(ours.shape[1], theirs.shape[1])  # what the reference has beyond must be unknown
    there = theirs[:, :shared] >= 0
    return bool((ours[:, :shared][there] == theirs[:, :shared][there]).all() and (theirs[:, shared:] < 0).all())


class ReferenceFolder:
    """One folder of reference data.

    Attributes:
        path: the folder.
        family: for `load`, where config.json does not say the family.
    """

    def __init__(self, path: Path, family: str | None = None) -> None:
        self.path, self.family = path, family
        self._models: dict[str, Model] = {}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Its expected.safetensors."""
        from safetensors.torch import load_file

        return load_file(self.path / "expected.safetensors")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Its expected.json."""
        return json.loads((self.path / "expected.json").read_text())

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The settings of the stored runs, under the reference's names."""
        return self.facts["generate"]

    @property
    def pass_block_length(self) -> int | None:
        """The block length of the stored pass; None if attention is not block-causal."""
        return self.facts.get("block_length_of_full_pass", self.facts.get("block_length_of_attention_mask"))

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return json.loads((self.path / "config.json").read_text())

    def write(self, folder: Path, **changes: Any) -> Path:
        """A copy of the checkpoint with its mask token and `changes` in config.json and generation_config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        mask = self.facts.get("mask_token_id")
        given = ({} if mask is None else {"mask_token_id": mask}) | changes
        for file in ("config.json", "generation_config.json"):
            if (self.path / file).is_file():
                (folder / file).write_text(json.dumps(json.loads((self.path / file).read_text()) | given))
        for part in (self.path / "model.safetensors", *(one for one in self.path.iterdir() if one.is_dir())):
            if not (folder / part.name).exists():
                (folder / part.name).symlink_to(part.resolve())
        return folder

    def load(
        self,
        device: torch.device | str = "cpu",
        changes: Mapping[str, Any] | None = None,
        block_length: int | None = None,
    ) -> Model:
        """The checkpoint in float32, with `changes` of its config; one model for equal arguments."""
        key = json.dumps([str(device), dict(changes or {}), block_length])
        if key not in self._models:
            with TemporaryDirectory() as place:
                self._models[key] = load(
                    self.write(Path(place), **changes or {}), family=self.family, block_length=block_length,
                    device=device, dtype=torch.float32,
                )  # fmt: skip
        return self._models[key]

    def repeat(self, stored: StoredRun, device: torch.device | str = "cpu", **more: Any) -> Generation:
        """A stored run as sinklens writes it; `more` are further arguments of `generate`, and hooks are added."""
        model = self.load(device, stored.changes, stored.block_length or self.pass_block_length)
        hooks = [*stored.settings.get("hooks", ()), *more.pop("hooks", ())]
        return generate(model, stored.prompt, progress=False, **stored.settings | more | {"hooks": hooks})


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape."""
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()
