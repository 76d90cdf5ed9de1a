"""Interventions that change the weight matrices of layers while a run lasts; afterwards they are as before.

`EditWeights` finds the matrices, keeps a copy of each, and restores them, even after an error. A subclass says how one
matrix changes:

    @dataclass(frozen=True)
    class Halved(EditWeights):
        def edited(self, model, matrix):
            return matrix.rows / 2

A *matrix* is a parameter of a layer with two axes or more: projections, routers, and stacked experts, but not
embeddings, norms, biases or the language-model head. Its *rows* are its outputs.

Pitfall: the model changes for every row of a batch, and for every other use of it while the run lasts.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from sinklens.errors import require
from sinklens.hooks.offload import form_of
from sinklens.model import Model
from sinklens.runs.intervention import Intervention, Pairs, RunContext


class WeightMatrix(NamedTuple):
    """A weight matrix of a layer.

    Attributes:
        name: name of the parameter in the transformers model.
        rows: its values, a view: one row per output; stacked experts have a further axis in front.
        module: the module that it belongs to.
        reads: whether its input is the residual stream.
    """

    name: str
    rows: Float[Tensor, "*expert out inputs"]
    module: nn.Module
    reads: bool


@dataclass(frozen=True, kw_only=True)
class EditWeights(Intervention):
    """Base class of interventions that change weight matrices; a subclass defines `edited`.

    A copy of the original values of the changed matrices is kept in memory meanwhile.

    Attributes:
        layers: layers whose matrices are changed.

    Raises:
        SettingError: ``steps=``, ``heads=`` or ``positions=``; or weights that are offloaded or quantized.
    """

    changes_model: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("steps", "heads", "positions")

    @abstractmethod
    def edited(self, model: "Model", matrix: WeightMatrix) -> Float[Tensor, "*expert out inputs"]:
        """The rows that replace those of `matrix`, which it leaves as they are.

        Raises:
            SettingError: the matrix cannot be changed.
        """

    @contextmanager
    def applied(self, model: "Model") -> Iterator[None]:
        before: list[tuple[Tensor, Tensor]] = []
        try:
            for layer in self.chosen_layers(model):
                for matrix in weight_matrices(model, layer):
                    rows = self.edited(model, matrix)
                    before.append((matrix.rows, matrix.rows.clone()))
                    matrix.rows.copy_(rows)
            yield
        finally:
            for rows, original in reversed(before):
                rows.copy_(original)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        name = type(self).__name__
        require(
            not run.single,
            f"{name} changes the model and not a point, so a single pass cannot take it as hooks; write "
            f"`with {name}(...).applied(model):` around the pass.",
        )
        self.chosen_layers(model)
        return []


def weight_matrices(model: "Model", layer: int) -> Iterator[WeightMatrix]:
    """The weight matrices of a layer.

    Raises:
        SettingError: one is offloaded or quantized.
    """
    architecture = model.tree.architecture
    base = f"{architecture.base}.{architecture.layers}.{layer}"
    root: Any = model.tree.hf.get_submodule(base)
    writers = {f"{architecture.attn}.{architecture.o}", f"{architecture.mlp}.{architecture.down}"}
    for path, module in root.named_modules():
        form = form_of(module)
        require(
            form is None,
            f"{path} of layer {layer} is quantized ({form}); load the model in full precision to change its weights.",
        )
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2:
                continue
            require(
                not weight.is_meta, f"{path} of layer {layer} is offloaded; load the model on one device to change it."
            )
            rows = weight.data.T if type(module).__name__ == "Conv1D" else weight.data  # GPT-2 stores [in, out]
            reads = rows.shape[-1] == model.cfg.d_model and path not in writers and not name.startswith("down")
            yield WeightMatrix(".".join(part for part in (base, path, name) if part), rows, module, reads)
