"""Who wrote the score: a pre-softmax attention score split over everything that wrote its key and its query.

The score of query i and key j is s = q_i R(i) R(j)ᵀ k_jᵀ / √d_head, where R is the rotary embedding and

    k_j = W_Kᵀ (w ⊙ x_j / r_j) + b_K,    x_j = embedding + Σ heads + Σ MLPs + Σ output biases

is linear in what wrote the stream x_j, once the norm's scale r_j is taken from the pass (*frozen*). So are a key's norm
and the rotation: where a model normalizes keys, its root mean square is frozen too. A norm that subtracts the mean of
x_j subtracts that of each part. The noise level's scale and shift, where a network has them, follow the norm, and its
gates multiply what heads and MLPs write. With the query as it is, s is therefore a sum with one part per writer of the
key; with the key as it is, one part per writer of the query.

A softmax only compares keys. What all keys of a query share adds to every score and attracts no attention, so
`write_attribution` also splits the *excess*: the score minus its mean over the other keys that the query sees.

Limitation: frozen scales hide that a writer that lengthens the stream shrinks all other parts. Removing a writer
changes the score by its part only as far as the scales stay; path patching (`PathPatch`) recomputes them.
"""

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.experiments.attribution import wide
from sinklens.experiments.step_ids import StepIds, exact_step
from sinklens.hooks.rotary import rotations
from sinklens.interventions.paths import centered, refuse_indirect
from sinklens.model import Model
from sinklens.runs.intervention import within
from sinklens.runs.result import Generation
from sinklens.utils.arguments import checked


@checked
@torch.no_grad()
def write_attribution(
    run: "Generation",
    step: int,
    layer: int,
    head: int,
    query: int | None = None,
    key: int | None = None,
    *,
    row: int = 0,
    weighted: bool = False,
) -> xr.Dataset:
    """Split a head's score for a query and a key over the writers of the key's and of the query's residual stream.

        table = write_attribution(run, step=5, layer=2, head=3, key=17)
        print(table.to_dataframe().sort_values("from_key_excess"))

    One pass of the run's model over the step's canvas, without padding and undecided positions (-1). Hooks of the run
    are not applied again.

    Args:
        step, layer, head, row: indices; negative ones count from the end.
        query: canvas position of the query, including padding; None for the mean over all queries that see the key and
            another key, as a sink's column has it.
        key: canvas position of the key, including padding; None for the key with the largest column sum.
        weighted: weight the mean over queries by the attention that each pays to the key, instead of equally. Where
            only a few queries score a key high, its plain mean is ordinary.

    Returns:
        A variable per split, over ``writer``: "embed", "L0H0" (a head), "0_mlp_out", "bias" (the output biases of
        attention), "own_bias" (b_K for keys, b_Q for queries, and what the norm and the noise level add before the
        projection), and "rest", which completes the sum: rounding, and edits by hooks that are set on the model. In
        float32 it is below 1e-4 of the score.

        - ``from_key``, ``from_query``: parts of the score before masking and softmax.
        - ``from_key_excess``, ``from_query_excess``: parts of the score minus its mean over the other keys that the
          query sees.

        Coordinates ``kind`` ("embed", "head", "mlp", "bias", "rest"), ``layer`` and ``head`` (-1 if they have none)
        describe the writers. Attributes: ``score``, ``excess``, ``step``, ``layer``, ``head``, ``query`` (-1 for the
        mean) and ``key``.

    Raises:
        SettingError: an index that does not exist, a position that is padding or not decoded yet, a query that does not
            see the key and another one, or a model with norms after its sublayers (DiffusionGemma).
    """
    model = run.model
    layer, head = within("layer", [layer], model.cfg.n_layers)[0], within("head", [head], model.cfg.n_heads)[0]
    row, step = within("row", [row], len(run.canvas))[0], within("step", [step], run.steps_run)[0]
    given = exact_step(run, step)
    read = _Read.of(model, given.row(row), layer, head)
    place = int(read.pattern.sum(dim=0).argmax()) if key is None else given.place(row, key)
    chosen = read.queries(place, None if query is None else given.place(row, query), weighted)
    found = _splits(read, place, chosen)
    place_of_score = {
        "step": step, "layer": layer, "head": head, "query": -1 if query is None else query,
        "key": given.columns(row)[place],
    }  # fmt: skip
    return _table(found, layer, model.cfg.n_heads, place_of_score)


def _splits(read: "_Read", key: int, queries: Float[Tensor, " query"]) -> dict[str, Float[np.ndarray, " writer"]]:
    """The score and its excess, each split by what wrote the key and by what wrote the queries.

    The last part of each is the rest, which completes the sum.
    """
    found, alone = {}, torch.zeros_like(read.scores)
    alone[:, key] = 1.0
    others = read.seen.to(alone) * (1 - alone)  # equal shares at the other keys that a query sees
    excess = alone - others / others.sum(dim=1, keepdim=True).clamp(min=1)
    for ending, comparison in (("", alone), ("_excess", excess)):
        weights = comparison * queries[:, None]
        total = float((weights * read.scores.masked_fill(~read.seen, 0.0)).sum())
        for side, letter, toward in (
            ("from_key", "k", weights.T @ read.query),
            ("from_query", "q", weights @ read.key),
        ):
            parts = read.split(letter, toward)
            found[side + ending] = np.append(parts.cpu().double().numpy(), total - float(parts.double().sum()))
    return found


def _table(
    splits: dict[str, Float[np.ndarray, " writer"]], layer: int, heads: int, place: dict[str, int]
) -> xr.Dataset:
    """The splits by writer, in the order of `_Read.split`; `place` says which score they are of."""
    rows = [("embed", "embed", -1, -1)]
    for one in range(layer):
        rows += [*((f"L{one}H{head}", "head", one, head) for head in range(heads)), (f"{one}_mlp_out", "mlp", one, -1)]
    rows += [("bias", "bias", -1, -1), ("own_bias", "bias", layer, -1), ("rest", "rest", -1, -1)]
    writers = dict(zip(("writer", "kind", "layer", "head"), map(list, zip(*rows, strict=True)), strict=True))
    score, excess = (float(splits[name].sum()) for name in ("from_key", "from_key_excess"))
    data = {name: ("writer", parts) for name, parts in splits.items()}
    coords = {name: ("writer", values) for name, values in writers.items()}
    return xr.Dataset(data, coords, {"score": score, "excess": excess, **place})


@dataclass(frozen=True)
class _Read:
    """One row of a pass, as far as the scores of one head depend on it.

    Attributes:
        values: the values of the points read, without their batch axis, at least in float32.
        query, key: rotated queries and keys of the head.
        scores: before the normalizer, as a rule softmax; -inf where a key is hidden.
        pattern: the attention, from the model's normalizer.
    """

    model: "Model"
    layer: int
    head: int
    values: dict[str, Float[Tensor, "pos *shape"]]
    query: Float[Tensor, "query d_head"]
    key: Float[Tensor, "key d_head"]
    scores: Float[Tensor, "query key"]
    pattern: Float[Tensor, "query key"]

    @classmethod
    def of(cls, model: "Model", given: StepIds, layer: int, head: int) -> "_Read":
        """Read the points in one pass over a row without padding."""
        refuse_indirect(model, "write_attribution")
        require(
            not model.tree.architecture.positions,
            f"write_attribution splits rotated queries and keys, and a {model.config.model_type} model adds "
            f"learned positions to the stream; use edge_attribution.",
        )
        attn = f"blocks.{layer}.attn"
        points = ["hook_embed", f"blocks.{layer}.ln1.hook_scale"]
        points += [f"blocks.{one}.{name}" for one in range(layer) for name in ("attn.hook_z", "hook_mlp_out")]
        points += [f"{attn}.hook_{name}" for name in ("q", "k", "rot_q", "rot_k", "attn_scores", "pattern")]
        if model.tree.architecture.modulation:
            points += [f"blocks.{one}.adaln.hook_attn_gate" for one in range(layer)]
            points += [f"blocks.{layer}.adaln.hook_attn_{name}" for name in ("shift", "scale")]
        _, cache = model.tree.run_with_cache(given.ids, names_filter=points, time=given.time)
        values = {name: wide(cache[name][0]).to(model.cfg.device) for name in points}
        key_head = cls._key_head(model, head)
        query, key = values[f"{attn}.hook_rot_q"][:, head], values[f"{attn}.hook_rot_k"][:, key_head]
        scores, pattern = (values[f"{attn}.hook_{name}"][head] for name in ("attn_scores", "pattern"))
        return cls(model, layer, head, values, query, key, scores, pattern)

    @staticmethod
    def _key_head(model: "Model", head: int) -> int:
        return head * model.cfg.n_key_value_heads // model.cfg.n_heads

    @property
    def seen(self) -> Bool[Tensor, "query key"]:
        """Whether a query sees a key."""
        return self.scores > -torch.inf

    def queries(self, key: int, query: int | None, weighted: bool) -> Float[Tensor, " query"]:
        """The weights of the queries to average over; they sum to 1."""
        chosen = self.seen[:, key] & (self.seen.sum(dim=1) > 1)
        if query is not None:
            chosen = chosen & (torch.arange(len(chosen), device=chosen.device) == query)
        if not bool(chosen.any()):
            which = "no query sees" if query is None else f"query {query} of the real tokens does not see"
            raise SettingError(
                f"{which} key {key} and another key, so there is nothing to compare; choose a query that comes later."
            )
        weights = chosen.to(self.scores.dtype) * (self.pattern[:, key] if weighted else 1.0)
        return weights / weights.sum()

    def split(self, letter: str, toward: Float[Tensor, "pos d_head"]) -> Float[Tensor, " writer"]:
        """Σ_pos (rotated keys or queries) · `toward` / √d_head, split over the writers of the stream.

        Each linear map between the stream and the rotated vector is applied to `toward` in reverse, so that no writer's
        keys have to be formed.

        Args:
            letter: "k" or "q".
        """
        cfg, attn = self.model.cfg, self.model.blocks[self.layer].attn
        head = self.head if letter == "q" else self._key_head(self.model, self.head)
        turn = rotations(self.model.tree, torch.arange(len(toward))).to(toward)
        toward = torch.einsum("pd,ped->pe", toward, turn) / cfg.attn_scale
        norm = getattr(attn, f"{letter}_norm")
        if norm is not None:
            raw = self.values[f"blocks.{self.layer}.attn.hook_{letter}"][:, head]
            toward = toward * wide(norm.w) / (raw.pow(2).mean(dim=-1, keepdim=True) + norm.eps).sqrt()
        weight, bias = (wide(getattr(attn, f"{kind}_{letter.upper()}")[head]) for kind in "Wb")
        norm, shift = self._norm()
        toward_norm = toward @ weight.T
        own = (toward * bias).sum() + (toward_norm * shift).sum()
        direction = centered(toward_norm * norm / self.values[f"blocks.{self.layer}.ln1.hook_scale"], self.model)
        found = [(self.values["hook_embed"] * direction).sum()[None]]
        biases = torch.zeros_like(own)
        for layer in range(self.layer):
            z, attn = self.values[f"blocks.{layer}.attn.hook_z"], self.model.blocks[layer].attn
            gate = self.values.get(f"blocks.{layer}.adaln.hook_attn_gate", torch.ones_like(own))
            found.append(torch.einsum("phd,hdm,pm->h", z, wide(attn.W_O), direction * gate))
            found.append((self.values[f"blocks.{layer}.hook_mlp_out"] * direction).sum()[None])
            biases = biases + (direction * gate @ wide(attn.b_O).to(direction)).sum()
        return torch.cat([*found, biases[None], own[None]])

    def _norm(self) -> tuple[Float[Tensor, " d_model"], Float[Tensor, " d_model"]]:
        """What the layer's norm multiplies the normalized stream by, and what it adds, the modulation included."""
        norm = self.model.blocks[self.layer].ln1
        weight = wide(norm.w)
        bias = torch.zeros_like(weight) if norm.b is None else wide(norm.b)
        if not self.model.tree.architecture.modulation:
            return weight, bias
        shift, scale = (self.values[f"blocks.{self.layer}.adaln.hook_attn_{name}"] for name in ("shift", "scale"))
        return weight * (1 + scale), bias * (1 + scale) + shift
