"""Who reads a sink: what later components do with the message of one key.

A head's query i takes A[i, j] v_j from key j. `read_attribution` replaces v_j by the mean value of the keys that the
query sees, as `AblateValues` does, and the attention stays. The change of what the head writes,

    δ_i = Σ_heads A[i, j] (mean of v − v_j) W_O,

times the layer's gate where the network has one, then reaches only some later readers, on the direct path (as in
`PathPatch`): one component, or a group. What follows from them follows. The effect is the KL divergence of the step's
predictions from those of the unchanged pass.

Pitfall: an effect of the message is not one of the sink's attention. Masking a key also frees its attention, which
other keys then receive; compare with `MaskSinks`, and with the same effect of a control key.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.attribution import Pair, wide
from sinklens.experiments.edges import copies_within, receivers_of, stacked_patches
from sinklens.experiments.step_ids import exact_step
from sinklens.interventions.paths import Receiver, ResidualStream, refuse_indirect
from sinklens.runs.intervention import within
from sinklens.runs.result import require_run

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

EVERY = "all"


@torch.no_grad()
def read_attribution(
    run: "Generation",
    step: int,
    layer: int,
    head: int | None = None,
    key: int | None = None,
    *,
    row: int = 0,
    readers: Mapping[str, Sequence[str]] | None = None,
    memory_gb: float | int = 2.0,
) -> xr.Dataset:
    """The effect of a key's message on the predictions of a step, by the component that reads it.

        table = read_attribution(run, step=8, layer=1, head=0, key=18)
        print(table["kl"].to_series().nlargest(5))

    Passes of the run's model over the step's canvas, with a copy for each reader. Hooks of the run are not applied
    again.

    Args:
        step, layer, row: indices; negative ones count from the end.
        head: the head whose message is removed; None for all heads of the layer.
        key: canvas position of the key, including padding; None for the key with the largest column sum in the head or
            heads.
        readers: name -> labels of the components that read the change together, as the receivers of `PathPatch`. By
            default every later component alone.
        memory_gb: as in `path_patching_effects`.

    Returns:
        ``kl`` over ``reader``: mean over the undecided positions in nats (in an autoregressive run at the newest
        token). ``"all"``, the last reader, is every later component: the effect of the message on the step. Attributes:
        ``step``, ``layer``, ``head`` (-1 for all) and ``key``.

    Raises:
        SettingError: an index, position or component that does not exist, a reader that the head does not reach, or a
            model with norms after its sublayers (DiffusionGemma).
    """
    require_run(run, "run")
    model = run.model
    refuse_indirect(model, "readers")
    layer, step = within("layer", [layer], model.cfg.n_layers)[0], within("step", [step], run.steps_run)[0]
    heads = within("head", None if head is None else [head], model.cfg.n_heads)
    row = within("row", [row], len(run.canvas))[0]
    given = exact_step(run, step)
    here, columns = given.row(row), given.columns(row)
    pair = Pair(model, here.ids, here.ids, here.attention_mask, here.time)
    place, change = _message(pair, layer, heads, None if key is None else given.place(row, key))
    groups = _groups(readers, layer, model)
    places = torch.arange(len(columns))[-1:] if model.causal else run.undecided[row, step, columns].nonzero()[:, 0]
    values = _divergences(pair, change, list(groups.values()), places.to(here.ids.device), memory_gb)
    about = {"step": step, "layer": layer, "head": -1 if head is None else heads[0], "key": columns[place]}
    return xr.Dataset({"kl": ("reader", values)}, {"reader": list(groups)}, about)


def _message(pair: Pair, layer: int, heads: list[int], key: int | None) -> tuple[int, ResidualStream]:
    """The key, and the change of the stream if its value is replaced by the mean of those that a query sees."""
    attn, gate = f"blocks.{layer}.attn", f"blocks.{layer}.adaln.hook_attn_gate"
    gates = [gate] if pair.model.tree.architecture.modulation else []
    points = [*gates, f"{attn}.hook_pattern", f"{attn}.hook_v", f"{attn}.hook_attn_scores"]
    kept, _ = pair.values(pair.clean, points)
    pattern, scores = (kept[f"{attn}.{name}"][0, heads].float() for name in ("hook_pattern", "hook_attn_scores"))
    place = int(pattern.sum(dim=(0, 1)).argmax()) if key is None else key
    value, weight = kept[f"{attn}.hook_v"][0].float(), pair.model.blocks[layer].attn.W_O
    seen = (scores > -torch.inf).float()
    change: Float[Tensor, "pos d_model"] = torch.zeros(len(value), pair.model.cfg.d_model, device=value.device)
    for number, head in enumerate(heads):
        own = value[:, head * pair.model.cfg.n_key_value_heads // pair.model.cfg.n_heads]
        mean = seen[number] @ own / seen[number].sum(dim=1, keepdim=True).clamp(min=1)
        change = change + pattern[number, :, place, None] * (mean - own[place]) @ wide(weight[head])
    return place, change[None] * wide(kept[gate])[:, None] if gates else change[None]


def _groups(readers: Mapping[str, Sequence[str]] | None, layer: int, model: "Model") -> dict[str, list[Receiver]]:
    """The readers by name, and last all of them."""
    later = [receiver for receiver in receivers_of(model) if receiver.depth > 2 * layer]
    if readers is None:
        found = {receiver.name: [receiver] for receiver in later}
    else:
        found = {str(name): [Receiver.named(label, model) for label in labels] for name, labels in readers.items()}
    early = [receiver.name for group in found.values() for receiver in group if receiver.depth <= 2 * layer]
    if early:
        raise SettingError(f"{early[0]} does not read what heads of layer {layer} write; choose a later reader.")
    return {**found, EVERY: later}


def _divergences(
    pair: Pair, change: ResidualStream, groups: list[list[Receiver]], places: Tensor, memory_gb: float | int
) -> list[float]:
    """KL(unchanged ‖ changed) of the predictions, with the change read by one group in each copy of the pass."""
    before = pair.values(pair.clean, [])[1][0, places].double().log_softmax(-1)
    size, found = copies_within(pair, memory_gb), []
    for part in (groups[start : start + size] for start in range(0, len(groups), size)):
        hidden = pair.hidden(pair.clean, stacked_patches([(change, group) for group in part], pair), copies=len(part))
        for copy in hidden.split(1):
            after = pair.logits(copy)[0, places].double().log_softmax(-1)
            found.append(float((before.exp() * (before - after)).sum(dim=-1).mean()))
    return found
