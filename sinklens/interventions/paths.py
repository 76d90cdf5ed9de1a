"""Path patching: change what one component writes, as seen by one other component only.

The residual stream that a receiver reads is a sum of what all earlier components wrote. `PathPatch` puts a sender's
output of another run into that sum for one receiver:

    x' = x + (sender's output in the source − sender's output here),

so every component between sender and receiver stays as it is, and only the *direct* path is patched (Wang et al.,
2211.00593; Goldowsky-Dill et al., 2304.05969). The receiver's norm is recomputed on x'. Everything that depends on the
receiver (later layers, logits, decisions) is computed from the new value.

Components are named as TransformerLens labels them. Senders: ``"embed"``, ``"L1H3"`` (head 3 of layer 1),
``"1_mlp_out"``. Receivers: ``"L2H4.q"``, ``"L2H4.k"``, ``"L2H4.v"``, ``"2_mlp_in"``, ``"logits"``; in ``.k`` and ``.v``
the head is a key/value head, which several query heads may share.

Where the noise level gates what a head writes and scales what a receiver reads, the gate and the scale are those of the
patched pass.

Pitfall: a position of the stream is read by the same position of the receiver. `positions` are therefore those of the
receiver's queries for ``.q``, and those of its keys and values for ``.k`` and ``.v``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.points import Point
from sinklens.interventions.patching import FromSource, PatchHooks
from sinklens.model import Model
from sinklens.runs.intervention import HookFunction, Pairs, RunContext
from sinklens.utils.arguments import as_tuple, plainly_shown

ResidualStream = Float[Tensor, "batch pos d_model"]
SENDERS = "'embed', 'L1H3' (head 3 of layer 1) or '1_mlp_out'"
RECEIVERS = "'L2H4.q', 'L2H4.k', 'L2H4.v', '2_mlp_in' or 'logits'"


class Sender(NamedTuple):
    """A component that writes to the stream.

    Attributes:
        name: its label.
        point: the point where its output is read; ``hook_z`` for a head.
        layer: -1 for the embedding.
        head: None unless it is a head.
        depth: its place in the pass; it reaches receivers of a greater depth.
        gate: the point of the gate by which its output is multiplied; "" without one.
    """

    name: str
    point: str
    layer: int
    head: int | None
    depth: int
    gate: str = ""

    def written(self, change: Tensor, model: "Model", values: Mapping[str, Tensor]) -> ResidualStream:
        """The change of the stream that a change at `point` makes; `values` holds the gate of the pass."""
        if self.head is None:
            return change
        written = change[:, :, self.head] @ model.blocks[self.layer].attn.W_O[self.head].to(change)
        return written * values[self.gate][:, None].to(written) if self.gate else written


class Receiver(NamedTuple):
    """A component that reads the stream.

    Attributes:
        name: its label.
        point: the point where its input, or what it projects from it, is changed.
        stream: the point whose value it reads.
        letter: "q", "k" or "v"; "" for an MLP and the logits.
        layer: the number of layers for the logits.
        head: None unless it is a head.
        depth: its place in the pass.
        scale: the point of the scale that acts between its norm and its projection; "" without one.
    """

    name: str
    point: str
    stream: str
    letter: str
    layer: int
    head: int | None
    depth: int
    scale: str = ""

    @property
    def reads(self) -> list[str]:
        """The points whose values `changed` needs."""
        return [name for name in (self.stream, self.scale) if name and name != self.point]

    def changed(self, value: Tensor, change: ResidualStream, values: Mapping[str, Tensor], model: "Model") -> Tensor:
        """The value at `point` if the receiver reads the stream + `change`; unchanged where `change` is 0.

        Args:
            values: of the points that `reads` names.
        """
        if self.name == "logits":
            return value + change
        stream = values[self.stream]
        if not self.letter:
            return value + (_normalized(stream + change, model) - _normalized(stream, model)).to(value)
        block = model.blocks[self.layer]
        weight = getattr(block.attn, f"W_{self.letter.upper()}")[self.head]
        difference = block.ln1(stream + change) - block.ln1(stream)
        if self.scale:
            difference = difference * (1 + values[self.scale][:, None])
        difference = difference @ weight
        found = value.clone()
        found[:, :, self.head] += difference.to(found)
        return found


Component = TypeVar("Component", bound=Sender | Receiver)


def senders_of(model: "Model") -> list[Sender]:
    """Every component that writes to the stream, in the order of the pass."""
    found = [Sender("embed", "hook_embed", -1, None, -1)]
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        gate = f"{block}.adaln.hook_attn_gate" if model.tree.architecture.modulation else ""
        point, heads = f"{block}.attn.hook_z", range(model.cfg.n_heads)
        found += [Sender(f"L{layer}H{head}", point, layer, head, 2 * layer, gate) for head in heads]
        found.append(Sender(f"{layer}_mlp_out", f"{block}.hook_mlp_out", layer, None, 2 * layer + 1))
    return found


def receivers_of(model: "Model") -> list[Receiver]:
    """Every component that reads the stream, in the order of the pass."""
    cfg, found = model.cfg, list[Receiver]()
    for layer in range(cfg.n_layers):
        block, depth = f"blocks.{layer}", 2 * layer
        scale = f"{block}.adaln.hook_attn_scale" if model.tree.architecture.modulation else ""
        for letter, heads in (("q", cfg.n_heads), ("k", cfg.n_key_value_heads), ("v", cfg.n_key_value_heads)):
            point, stream = f"{block}.attn.hook_{letter}", f"{block}.hook_resid_pre"
            found += [
                Receiver(f"L{layer}H{head}.{letter}", point, stream, letter, layer, head, depth, scale)
                for head in range(heads)
            ]
        point, stream = f"{block}.ln2.hook_normalized", f"{block}.hook_resid_mid"
        found.append(Receiver(f"{layer}_mlp_in", point, stream, "", layer, None, depth + 1))
    last = f"blocks.{cfg.n_layers - 1}.hook_resid_post"
    return [*found, Receiver("logits", last, last, "", cfg.n_layers, None, 2 * cfg.n_layers)]


def named(components: Sequence[Component], labels: Iterable[str]) -> list[Component]:
    """The components with these labels.

    Raises:
        SettingError: no such component.
    """
    known: dict[str, Component] = {one.name: one for one in components}
    for label in labels:
        require(
            label in known,
            f"{label!r} is not among the {len(known)} components, which are {', '.join([*known][:2])} to "
            f"{[*known][-1]}; a sender is {SENDERS}, a receiver {RECEIVERS}.",
        )
    return [known[label] for label in labels]


def _normalized(stream: ResidualStream, model: "Model") -> ResidualStream:
    """The stream as a norm leaves it, without the norm's weight and bias."""
    wide = centered(stream.to(torch.promote_types(stream.dtype, torch.float32)), model)
    return wide / (wide.pow(2).mean(dim=-1, keepdim=True) + model.cfg.eps).sqrt()


def centered(stream: Float[Tensor, "*place d_model"], model: "Model") -> Float[Tensor, "*place d_model"]:
    """The stream minus its mean, if the model's norms subtract it."""
    return stream - stream.mean(dim=-1, keepdim=True) if model.tree.architecture.centered else stream


def refuse_indirect(model: "Model", what: str) -> None:
    """Refuse a model whose heads and MLPs do not write to the stream directly.

    Raises:
        SettingError: its sublayers' outputs are normalized.
    """
    require(
        not model.tree.architecture.ln1_post,
        f"{model.name} normalizes what its sublayers read or write, so there is no direct path of a single head; "
        f"{what} is not available for it.",
    )


class Changes:
    """What senders would write differently in one run, and the receivers that read it.

    Args:
        cut: at a step, the edges along which receivers read the changes; None for none.
    """

    def __init__(
        self, model: "Model", senders: Sequence[Sender], receivers: Sequence[Receiver],
        cut: Callable[[int], Bool[Tensor, "sender receiver #pos"] | None],
    ) -> None:  # fmt: skip
        self._model, self._senders, self._receivers, self._cut = model, senders, receivers, cut
        self._values: dict[str, Tensor] = {}
        self._changes: dict[str, ResidualStream] = {}
        self._stacked: tuple[list[int], ResidualStream] | None = None

    def around(self, sends: Pairs) -> Pairs:
        """The hooks of senders, in the order of the pass, between those that they need and those of receivers."""
        gates = [sender.gate for sender in self._senders if sender.gate]
        read = dict.fromkeys([*gates, *(name for one in self._receivers for name in one.reads)])
        points = dict.fromkeys(one.point for one in self._receivers)
        return [*((name, keeps(self._values)) for name in read), *sends, *((name, self._receive) for name in points)]

    def sending(self, sender: Sender, patch: HookFunction) -> HookFunction:
        """A hook that keeps what `patch` would change of what `sender` writes, and changes nothing."""

        def send(value: Tensor, hook: Point) -> None:
            self._stacked, new = None, patch(value, hook=hook)
            if new is None:
                self._changes.pop(sender.name, None)
            else:
                self._changes[sender.name] = sender.written(new - value, self._model, self._values)

        return send

    def _receive(self, value: Tensor, hook: Point) -> Tensor | None:
        """The value of a point as its receivers have it."""
        cut, before = self._cut(int(hook.step or 0)), value
        for number, receiver in enumerate(self._receivers):
            if cut is None or receiver.point != str(hook.name):
                continue
            change = self._sum(cut[:, number], receiver.depth)
            value = value if change is None else receiver.changed(value, change, self._values, self._model)
        return None if value is before else value

    def _sum(self, cut: Bool[Tensor, "sender #pos"], depth: int) -> ResidualStream | None:
        """The sum of the changes along the edges to a receiver of this depth; None without any."""
        there = [at for at, one in enumerate(self._senders) if one.depth < depth and one.name in self._changes]
        if not there or not bool(cut[there].any()):
            return None
        if self._stacked is None or self._stacked[0] != there:
            self._stacked = there, torch.stack([self._changes[self._senders[at].name] for at in there])
        stacked = self._stacked[1]
        length = stacked.shape[2]
        require(
            cut.shape[1] in (1, length),
            f"kept has {cut.shape[1]} positions, and the pass {length}; give one for each column.",
        )
        return torch.einsum("sbpd,sp->bpd", stacked, cut[there].expand(-1, length).to(stacked))


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class PathPatch(FromSource):
    """Patch the direct path from one component to another with values of another run.

        kept = Activations(names=["blocks.0.attn.hook_z"])
        corrupted(base, {" 6": " 8"}, hooks=kept)
        patch = PathPatch(sender="L0H2", receiver="L1H3.k", source=kept.caches)
        run = sinklens.generate(model, prompt, replay=base, hooks=patch)

    Attributes:
        sender: a label or several, whose changes are added: "embed", "L1H3", "1_mlp_out".
        receiver: a label or several: "L2H4.q", "L2H4.k", "L2H4.v", "2_mlp_in", "logits".
        source: as in `PatchHooks`, with the senders' points: ``hook_embed``, ``hook_z``, ``hook_mlp_out``. For a path
            that carries a mean, pass the mean at every position.
        steps: steps of this run; by default those for which `source` holds values.
        positions: positions at which the stream is changed.
        where: positions that may differ by row, step, and layer and head of the sender; see `AtPositions`.
        source_positions: as in `PatchHooks`.

    Raises:
        SettingError: a label that does not exist, a receiver that the pass reaches before a sender, what `PatchHooks`
            refuses, or a model with norms after its sublayers (DiffusionGemma).
    """

    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")
    indexed: ClassVar[tuple[str, ...]] = ("sender", "receiver")

    sender: str | Sequence[str]
    receiver: str | Sequence[str]

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        senders = sorted(named(senders_of(model), dict.fromkeys(as_tuple(self.sender))), key=lambda one: one.depth)
        receivers = named(receivers_of(model), as_tuple(self.receiver))
        refuse_indirect(model, "PathPatch")
        for sender in senders:
            for receiver in receivers:
                require(
                    sender.depth < receiver.depth,
                    f"{receiver.name} does not read what {sender.name} writes in the same step; choose a receiver "
                    f"after it, or an earlier sender.",
                )
        every = torch.ones(len(senders), len(receivers), 1, dtype=torch.bool)
        changes, sends = Changes(model, senders, receivers, lambda step: every), list[Any]()
        for one in senders:
            patch = PatchHooks(
                source=self.source, names=[one.point], steps=self.steps, positions=self.positions, where=self.where,
                heads=None if one.head is None else [one.head], source_positions=self.source_positions,
            ).hooks_for(model, run)  # fmt: skip
            sends += [(at, changes.sending(one, hook) if at == one.point else hook) for at, hook in patch]
        return changes.around(sends)


def keeps(values: dict[str, Tensor]) -> HookFunction:
    """A hook that keeps the value of its point in `values`."""

    def keep(value: Tensor, hook: Point) -> None:
        values[str(hook.name)] = value

    return keep
