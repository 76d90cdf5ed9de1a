"""Interventions on the canvas: forced, remasked and renoised tokens, text after the answer, and an extra sink token.

Pitfall: a sampler plans how many positions it decides per step. Positions remasked in the last steps may stay masked;
the answer then reports them (`Answer.masks`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.points import Point
from sinklens.interventions.places import CANVAS, AtPositions, Places
from sinklens.model import Model
from sinklens.runs.intervention import Canvas, Intervention, Pairs, RunContext, place_mask
from sinklens.utils.arguments import Words, plainly_shown
from sinklens.utils.integers import as_integer

ACCEPTED = "denoise.hook_accepted"
CHANGES_CANVAS = "changes the canvas of a run; for a single pass change the ids, or use generate."


@plainly_shown
@dataclass(frozen=True)
class ForceTokens(Intervention):
    """Put tokens on the canvas when the chosen steps begin.

    In an autoregressive run a position is skipped until it is decoded; then the forced token replaces its token.

    Attributes:
        tokens: position -> token id, or one id per prompt (None for a prompt that keeps its own token); positions as in
            ``positions=``, not counting padding.
    """

    needs_run: ClassVar[str] = f"ForceTokens {CHANGES_CANVAS}"
    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads", "positions")

    tokens: Annotated[
        Mapping[int, int | Sequence[int | None]], Words("a dict of positions and token ids, such as {20: 500}")
    ]

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        in_step = self.step_test(run)
        places: list[tuple[Tensor, int]] = []
        for position, given in self.tokens.items():
            rows = [given] if isinstance(given, int | str) else given
            place = place_mask([position], run.real)
            own = _of_rows(torch.arange(len(rows), device=place.device)[:, None], len(place), "ForceTokens.tokens")
            for row, token in enumerate(rows):
                if token is not None:
                    _check_token(token, model)
                    places.append((place & (own == row), token))

        def force(value: Int[Tensor, "batch pos"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            for place, token in places:
                value = value.masked_fill(place[:, : value.shape[1]], token)
            return value

        return [(CANVAS, force)]


@dataclass(frozen=True, kw_only=True)
class Remask(AtPositions):
    """Mask positions of the answer again when the chosen steps begin, or all of it; diffusion models only.

    Attributes:
        positions, where: positions that are masked again; those of the prompt that `where` finds stay as they are.
    """

    needs_run: ClassVar[str] = f"Remask {CHANGES_CANVAS}"
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        require(
            not run.causal and model.family_record.masked,
            f"a {model.family} model has no mask token; use ForceTokens to put tokens on the canvas.",
        )
        places = Places(self, model, run, [CANVAS])
        _refuse_prompt(self, run)
        answer = torch.arange(run.real.shape[1], device=run.real.device) >= run.prompt_length

        def remask(value: Int[Tensor, "batch pos"], hook: Point) -> Tensor | None:
            found = places.at(hook.step or 0, None)
            return None if found is None else value.masked_fill(found.any(dim=1) & answer, run.mask_id)

        return places.around([(CANVAS, remask)])


@dataclass(frozen=True, kw_only=True)
class Renoise(AtPositions):
    """Renoise positions of a canvas of random tokens in the chosen steps, however certain their tokens are.

        Renoise(where=EpsilonOverMean())                     # the sinks of the step before
        Renoise(where=base.sinks, steps=[5])                 # those of step 5 of another run
        Renoise(where=Where(top_k=1, of=(2, 0)), steps=[5])  # the strongest key of head 2.0

    A step draws a token at every position of its canvas and accepts those of lowest entropy; all others are *renoised*:
    they get a random token. All draws stay those of the run without the intervention, as long as the tokens before them
    are equal.

    Pitfall: the last step of a canvas leaves the most likely tokens, not the accepted ones. An intervention there
    changes nothing, and neither does one under ``replay=``, where the canvases are given.

    Attributes:
        positions, where: positions that are renoised; without both, all of the canvas. Positions that `where` finds in
            several layers or heads count once. Those outside the canvas of the step, such as sinks of the prompt, stay
            as they are, without a warning.
    """

    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        require(
            not run.single and ACCEPTED in model.hook_names(),
            "Renoise changes which tokens a step accepts on a canvas of random tokens; a single pass and other "
            "models do not accept any. With a mask token, use Remask or ForceTokens.",
        )
        places, canvas = Places(self, model, run), Canvas(run)
        _refuse_prompt(self, run)

        def renoise(value: Bool[Tensor, "batch pos"], hook: Point) -> Tensor | None:
            found = places.in_any_head(hook.step or 0)
            if found is None:
                return None
            assert canvas.now is not None
            stop = canvas.now.ids.shape[1]
            return value & ~found[:, stop - value.shape[1] : stop].to(value.device)

        return places.around([(CANVAS, canvas.hook), (ACCEPTED, renoise)])


@dataclass(frozen=True)
class Suffix(Intervention):
    """Fixed text after the answer: the run fills the gap between the prompt and it (infilling).

    For models whose attention is bidirectional. The suffix is part of the canvas and is never decided. Restrictions do
    not apply.

    Attributes:
        text: text, for models with a tokenizer, or token ids; or one list of ids per prompt, all of the same length.
    """

    needs_run: ClassVar[str] = f"Suffix {CHANGES_CANVAS}"
    refused: ClassVar[tuple[str, ...]] = ("steps", "layers", "heads", "positions")

    text: str | Sequence[int] | Sequence[Sequence[int]]

    def extend(
        self, model: "Model", ids: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], Int[Tensor, "batch behind"]]:
        require(
            not model.causal and model.block_length is None,
            f"{model.name} does not see text after its answer, so it cannot fill a gap; use a bidirectional model.",
        )
        suffix = model.encode(self.text, **({"prepend_bos": False} if isinstance(self.text, str) else {})).ids
        require(
            model.mask_token_id not in suffix.flatten().tolist(),
            f"the suffix contains the mask token ({model.mask_token_id}), which the sampler would replace.",
        )
        return ids, real, _of_rows(suffix.to(ids.device), len(ids), "Suffix.text")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`; only the canvas that the run starts from is changed."""
        return []


@dataclass(frozen=True, kw_only=True)
class SinkToken(AtPositions):
    """An extra token that sees only itself and is seen by all (One Token Is Enough, 2601.19657; trained there).

    It is inserted before a row's first token, after its padding, and is part of the canvas: the other positions shift
    by one, but their distances do not change. In ``t.sinks`` it is a position like any other. Use at most one.

    Attributes:
        token: its id; by default the start token, or else the end token.
        value: "own", the value that the model computes; or "zero", so that attention to it adds nothing.
    """

    refused: ClassVar[tuple[str, ...]] = ("heads", "positions", "where")

    token: int | None = None
    value: Literal["own", "zero"] = "own"

    def extend(
        self, model: "Model", ids: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, "batch longer"], Bool[Tensor, "batch longer"], Int[Tensor, "batch behind"]]:
        extra = torch.arange(ids.shape[1] + 1, device=ids.device) == real.long().argmax(dim=1, keepdim=True)
        longer = torch.cat([ids[:, :1], ids], dim=1).masked_fill(extra, self._token(model))
        return longer, torch.nn.functional.pad(real, (1, 0)) | extra, ids[:, :0]

    def _token(self, model: "Model") -> int:
        if self.token is not None:
            _check_token(self.token, model)
            return self.token
        candidates = [*model.special_tokens["start"], *model.special_tokens["end"]]
        require(candidates, f"{model.name} defines neither a start nor an end token; pass one as token=.")
        return candidates[0]

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`; in a single pass the ids already begin with the extra token."""
        layers, places = self.chosen_layers(model), Places(self, model, run)

        def extra(hook: Point, queries: int, device: torch.device) -> Bool[Tensor, "rows query"] | None:
            """Where the extra token is among the queries of a pass; None if absent or if there is nothing to do."""
            rows = places.of_queries(hook, queries, device)
            if rows is None:
                return None
            first, real = hook.forward_pass.first(queries), hook.forward_pass.real if run.single else run.real
            found = place_mask([0], real)[:, first : first + queries].to(device) & rows[:, 0]
            return found if bool(found.any()) else None

        def alone(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            distance = hook.forward_pass.distances(value.device)
            token = extra(hook, len(distance), value.device)
            if token is None:
                return None
            return value.masked_fill((token[:, :, None] & (distance != 0))[:, None], -torch.inf)

        def empty(value: Float[Tensor, "batch pos kv_head d_head"], hook: Point) -> Tensor | None:
            token = extra(hook, value.shape[1], value.device)
            return None if token is None else value.masked_fill(token[:, :, None, None], 0.0)

        pairs: Pairs = []
        for layer in layers:
            at = f"blocks.{layer}.attn"
            if self.value == "zero":
                pairs.append((f"{at}.hook_v", empty))
            if not model.causal:  # a causal first token sees only itself anyway
                pairs.append((f"{at}.hook_attn_mask", alone))
        return pairs


def _of_rows(given: Int[Tensor, "prompt n"], rows: int, name: str) -> Int[Tensor, "row n"]:
    """What is given for one prompt or for each, for all rows; copies of a batch follow each other."""
    require(
        not (rows % len(given)),
        f"{name} is for {len(given)} prompts, and the run has {rows} rows; pass it for one or for each.",
    )
    return given.repeat(rows // len(given), 1)


def _check_token(token: int, model: "Model") -> None:
    require(
        as_integer(token) in range(model.cfg.d_vocab),
        f"token {token!r} does not exist; the vocabulary is 0 to {model.cfg.d_vocab - 1}. "
        f"model.to_single_token(text) gives the id of a one-token text.",
    )


def _refuse_prompt(what: AtPositions, run: RunContext) -> None:
    """Refuse positions of the prompt, which no step decides."""
    prompt, length = run.prompt_length, run.real.shape[1]
    require(
        what.positions is None or not place_mask(what.positions, run.real)[:, :prompt].any(),
        f"{type(what).__name__} takes positions of the answer, {prompt} to {length - 1} or -{length - prompt} to -1; "
        f"got {list(what.positions or ())}.",
    )
