"""A cache of a pass whose blocks are gated by the noise level, with TransformerLens's decompositions of the stream.

What attention and the MLP write is multiplied by a gate of the row (modulation.py). TransformerLens multiplies the
activations of heads and neurons with ``W_O`` and ``W_out`` alone, and here the gate follows. Between the final norm and
the head, the row's final scale and shift act, so

    logit = Σ components + b_U[token] + hook_final_shift · W_U[:, token]

where the components are those of `ModulatedCache.logit_attrs`.

Limitation: gates and final scale are read from the cache; a ``names_filter`` has to include them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities import Slice

from sinklens.errors import SettingError
from sinklens.hooks.spellings import HookCache


def cache_of(
    values: Mapping[str, Tensor], tree: Any, has_batch_dim: bool = True, windows: Mapping[str, range] | None = None
) -> HookCache:
    """The cache of a pass of `tree` with these values, by point; see `HookCache`."""
    kind = ModulatedCache if tree.architecture.modulation else HookCache
    return kind(values, tree, has_batch_dim, windows)


def _slice(given: Any) -> Slice:
    return given if isinstance(given, Slice) else Slice(given)


class ModulatedCache(HookCache):
    """`HookCache` of a network that is conditioned on the noise level."""

    model: Any

    def compute_head_results(self) -> None:
        """Cache ``hook_result`` of every layer that lacks it: z · W_O · gate."""
        for layer in range(self.model.cfg.n_layers):
            name = f"blocks.{layer}.attn.hook_result"
            if name not in self.cache_dict:
                z, weights = self["z", layer, "attn"], self.model.blocks[layer].attn.W_O.detach()
                result = torch.einsum("...hd,hdm->...hm", z, weights.to(z))
                self.cache_dict[name] = result * self._of_row(layer, "attn")[..., None, None, :]

    def stack_head_results(self, *args: Any, **options: Any) -> Any:
        """See TransformerLens; the results carry the gate."""
        self.compute_head_results()
        return super().stack_head_results(*args, **options)

    def get_neuron_results(
        self, layer: int, neuron_slice: Any = None, pos_slice: Any = None, project_output_onto: Tensor | None = None
    ) -> Tensor:
        """What each neuron adds to the stream, activation · W_out · gate; arguments as in TransformerLens."""
        neurons, places = _slice(neuron_slice), _slice(pos_slice)
        activations = neurons.apply(places.apply(self["post", layer, "mlp"], dim=-2), dim=-1)
        weights = neurons.apply(self.model.blocks[layer].mlp.W_out.detach(), dim=0)
        gate = self._beside(self._of_row(layer, "mlp"), places)
        written = weights * (gate if weights.ndim == 1 else gate[..., None, :])
        if project_output_onto is not None:
            written = written @ project_output_onto
        one_number = project_output_onto is not None and project_output_onto.ndim == 1
        return (activations if one_number else activations[..., None]) * written

    def stack_neuron_results(
        self, layer: int, *args: Any, apply_ln: bool = False, project_output_onto: Tensor | None = None, **options: Any
    ) -> Any:
        """See TransformerLens; a projection after the norm is applied to the complete results."""
        if not apply_ln or project_output_onto is None:
            options |= {"apply_ln": apply_ln, "project_output_onto": project_output_onto}
            return super().stack_neuron_results(layer, *args, **options)
        options["apply_ln"] = True
        found = super().stack_neuron_results(layer, *args, **options)
        if isinstance(found, tuple):
            return found[0] @ project_output_onto, found[1]
        return found @ project_output_onto

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """See TransformerLens; the last component, the biases, carries the gates."""
        layer = self.model.cfg.n_layers if layer is None or layer == -1 else layer
        stack, labels = super().get_full_resid_decomposition(
            layer, mlp_input, expand_neurons, apply_ln, pos_slice, True, project_output_onto
        )
        places = _slice(pos_slice)
        like = places.apply(self["hook_embed"], dim=-2)
        bias = self._beside(self._biases(layer, mlp_input, expand_neurons), places).expand_as(like)[None]
        if apply_ln:
            bias = self.apply_ln_to_stack(bias, layer, mlp_input=mlp_input, pos_slice=places)
        bias = bias if project_output_onto is None else bias @ project_output_onto
        stack = torch.cat([stack[:-1], bias])
        return (stack, labels) if return_labels else stack

    def logit_attrs(
        self,
        residual_stack: Float[Tensor, "component *place d_model"],
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Float[Tensor, "component *place"]:
        """What each component adds to a token's logit, the row's final scale included; arguments as in TransformerLens.

        The sum of all components is the logit minus b_U and minus ``hook_final_shift @ W_U[:, token]``.
        """
        normed = self.apply_ln_to_stack(
            residual_stack, -1, pos_slice=pos_slice, batch_slice=batch_slice, has_batch_dim=has_batch_dim
        )
        scale = 1 + self["hook_final_scale"]
        scale = _slice(batch_slice).apply(scale) if has_batch_dim else scale
        directions = self._unscaled(tokens)
        if incorrect_tokens is not None:
            directions = directions - self._unscaled(incorrect_tokens)
        if scale.ndim == 2 and normed.ndim == 4:
            scale = scale[:, None]
            if directions.ndim == 2 and len(directions) == len(scale):
                directions = directions[:, None]  # a token per row, for all positions
        return (normed * scale * directions).sum(dim=-1)

    def logit_lens(self, **options: Any) -> Any:
        """Not available: TransformerLens's lens leaves out what the noise level does after the final norm.

        Raises:
            SettingError: always.
        """
        raise SettingError(
            "cache.logit_lens reads the stream through the final norm and the head, and the noise level of this "
            "network acts between them; use sinklens.experiments.logit_lens on a run."
        )

    def _unscaled(self, tokens: Any) -> Float[Tensor, "*place d_model"]:
        """Directions of tokens without the final scale, which differs from row to row."""
        if isinstance(tokens, str):
            tokens = self.model.to_single_token(tokens)
        return self.model.W_U.detach().T[tokens] * self.model.ln_final.w.detach()

    def _of_row(self, layer: int, part: str) -> Float[Tensor, "*batch d_model"]:
        """The gate of attention ("attn") or the MLP ("mlp")."""
        return self[f"blocks.{layer}.adaln.hook_{part}_gate"]

    def _beside(self, of_row: Float[Tensor, "*batch d_model"], places: Slice) -> Float[Tensor, "*batch pos d_model"]:
        """A value of rows with the axis of positions that `places` leaves."""
        return of_row if places.mode == "int" else of_row[..., None, :]

    def _biases(self, layer: int, mlp_input: bool, mlp_biases: bool) -> Float[Tensor, "*batch d_model"]:
        """The gated biases that are written to the stream before `layer`; `HookTree.accumulated_bias` without gates."""
        found = torch.zeros_like(self._of_row(0, "attn"))
        for number in range(layer + mlp_input):
            block = self.model.blocks[number]
            found = found + self._of_row(number, "attn") * block.attn.b_O.detach()
            if mlp_biases and number < layer:
                found = found + self._of_row(number, "mlp") * block.mlp.b_out.detach()
        return found
