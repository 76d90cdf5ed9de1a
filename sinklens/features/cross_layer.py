"""Cross-layer transcoders: features that are read in one layer and write to the MLPs of this and all later layers.

With x_l what layer l reads and L layers (Ameisen et al., "Circuit Tracing", 2025),

    f_l = activation(x_l W_enc_l + b_enc_l),    ŷ_l = Σ_{i ≤ l} f_i W_dec_i[:, l − i] + b_dec_l.

One is a list of transcoders here, `SparseAutoencoder`, one for each layer: that of layer i writes L − i vectors side by
side, for the layers i to L − 1, and adds b_dec_i to the first. `SpliceCrossLayer` runs all of them.

circuit-tracer (`load_clt` of version 0.5.0) stores two files per layer, ``W_enc_i.safetensors`` with ``W_enc_i``
[d_sae, d_in], ``b_enc_i``, ``b_dec_i`` and perhaps ``threshold_i``, and ``W_dec_i.safetensors`` with ``W_dec_i``
[d_sae, L − i, d_out].

Pitfall: the files name no points. circuit-tracer's defaults are `hook_resid_mid` and `hook_mlp_out`; a transcoder that
reads another point makes nonsense of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sinklens.errors import CheckpointError, SettingError
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.places import InScope, PointPlaces, Scope, states_of, stream_point
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.interventions.rules import Rule
from sinklens.runs.intervention import Pairs, RunContext, layer_of

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class SpliceCrossLayer(AtPositions):
    """Replace what all MLPs write by what a cross-layer transcoder makes of the pass.

        SpliceCrossLayer(transcoders=load_cross_layer(folder), scope="masked")

    Attributes:
        transcoders: those of the layers, in order, as `load_cross_layer` returns them.
        scope, where, positions, steps: the positions at which the MLPs are replaced, as in `SpliceSAE`. Features are
            computed at every position.

    Raises:
        SettingError: sizes that do not fit each other, an unknown scope; in the run, another number of layers or
            activations of another size.
    """

    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")

    transcoders: Sequence[SparseAutoencoder]
    scope: Scope = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        states_of(self.scope)
        _check_sizes(self.transcoders)

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=`` and ``where=``."""
        return InScope.within(self.scope, super().rule)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        if len(self.transcoders) != model.cfg.n_layers:
            raise SettingError(
                f"the cross-layer transcoder has {len(self.transcoders)} layers, and {model.name} has "
                f"{model.cfg.n_layers}; use one of this model."
            )
        sums: dict[int, Float[Tensor, "batch pos d_out"]] = {}

        def read(value: Tensor, hook: Point) -> None:
            first = layer_of(hook)
            if first == 0:
                sums.clear()
            one, x = self.transcoders[first], value.float()
            parts = one.decode(one.encode(x), x).chunk(len(self.transcoders) - first, dim=-1)
            for layer, part in enumerate(parts, start=first):
                sums[layer] = sums[layer] + part if layer in sums else part

        def write(value: Tensor, hook: Point, places: PointPlaces) -> Tensor | None:
            new, chosen = sums.get(layer_of(hook)), places.selected(hook, value)
            if new is None or new.shape != value.shape:
                raise SettingError(
                    f"{hook.name} has the shape {list(value.shape)}, and the cross-layer transcoder writes "
                    f"{'nothing before it' if new is None else list(new.shape)}; use one of this model and point."
                )
            return None if chosen is None else torch.where(chosen[..., None], new.to(value), value)

        pairs: Pairs = []
        for one in self.transcoders:
            point, to = stream_point(model, one.point), stream_point(model, one.point_out)
            places = PointPlaces(self, model, run, to)
            pairs += places.around([(point, read), (to, lambda value, hook, at=places: write(value, hook, at))])
        return pairs


def load_cross_layer(
    folder: str | Path,
    reads: str = "hook_resid_mid",
    writes: str = "hook_mlp_out",
    model: str = "",
    device: str | torch.device = "cpu",
) -> list[SparseAutoencoder]:
    """Read a cross-layer transcoder as circuit-tracer stores it, in float32.

    Args:
        folder: holds ``W_enc_i.safetensors`` and ``W_dec_i.safetensors`` of all layers.
        reads, writes: the points of a layer, without ``blocks.i.``.
        model: name of the model.
        device: where the weights are put.

    Raises:
        CheckpointError: a file is missing or broken, or holds other weights.
    """
    path = Path(folder)
    layers = len(list(path.glob("W_enc_*.safetensors")))
    if not layers:
        raise CheckpointError(
            f"{folder} has no W_enc_0.safetensors; pass a folder with a cross-layer transcoder in circuit-tracer's "
            f"layout."
        )
    found = [_layer(path, layer, layers) for layer in range(layers)]
    try:
        made = [
            SparseAutoencoder(
                **tensors, architecture="jumprelu" if "threshold" in tensors else "standard", subtract_b_dec=False,
                point=f"blocks.{layer}.{reads}", point_out=f"blocks.{layer}.{writes}", model=model, transcoder=True,
            ).to(device)
            for layer, tensors in enumerate(found)
        ]  # fmt: skip
        _check_sizes(made)
    except SettingError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return made


def _layer(path: Path, layer: int, layers: int) -> dict[str, Any]:
    """The weights of a layer, as those of a transcoder that writes `layers` − `layer` vectors."""
    stored: dict[str, Tensor] = {}
    for name in ("W_enc", "W_dec"):
        file = path / f"{name}_{layer}.safetensors"
        try:
            stored |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Download it again.") from error
    wanted = {f"{name}_{layer}" for name in ("W_enc", "b_enc", "b_dec", "W_dec")}
    optional = {f"threshold_{layer}"}
    if not wanted <= set(stored) <= wanted | optional:
        raise CheckpointError(
            f"layer {layer} in {path} must hold {', '.join(sorted(wanted))}, perhaps {', '.join(optional)}; it holds "
            f"{', '.join(sorted(stored))}."
        )
    values = {name.removesuffix(f"_{layer}"): value.float() for name, value in stored.items()}
    if values["W_dec"].ndim != 3 or values["W_dec"].shape[1] != layers - layer:
        raise CheckpointError(
            f"W_dec_{layer} in {path} must be [d_sae, {layers - layer}, d_out], one vector for each layer from {layer} "
            f"on; got {list(values['W_dec'].shape)}."
        )
    later = torch.zeros(values["W_dec"].shape[2] * (layers - layer - 1))
    values |= {"W_enc": values["W_enc"].T.contiguous(), "W_dec": values["W_dec"].flatten(1)}
    return values | {"b_dec": torch.cat([values["b_dec"].flatten(), later])}


def _check_sizes(transcoders: Sequence[SparseAutoencoder]) -> None:
    """Check that transcoder i of L writes L − i vectors of one size."""
    sizes = [one.d_out / (len(transcoders) - layer) for layer, one in enumerate(transcoders)]
    if not transcoders or len(set(sizes)) != 1 or not all(one.transcoder for one in transcoders):
        raise SettingError(
            f"a cross-layer transcoder has one transcoder per layer, and that of layer i of L writes L - i vectors of "
            f"one size; these write {', '.join(f'{size:g}' for size in sizes) or 'nothing'} numbers per layer."
        )
