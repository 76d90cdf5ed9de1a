"""DiffusionGemma: an encoder and a decoder, in transformers' own class.

A causal encoder reads the text and writes keys and values; a layer with a sliding window keeps only the last of them. A
decoder with the same layers works on a canvas of random tokens, which sees the cached keys and itself.

- ``load`` takes a folder or a ``DiffusionGemmaForBlockDiffusion``. The defaults of a run are those of
  generation_config.json and of ``canvas_length``. Images, and prompts with the image token, are refused.
- The encoder's points are ``encoder.hook_embed``, ``encoder.blocks.{l}.…`` and ``encoder.ln_final.…``; they are reached
  in the first step of a canvas. The decoder reads the encoder's keys and values as hooks left them, and nothing else: a
  later edit in the encoder's last layer has no effect.
- ``hook_pattern`` of the decoder has the canvas's queries, and the keys of the canvas and of the text that the layer's
  window reaches; ``hook.key_positions`` gives their positions in the text. A recorded score is at its position;
  positions out of reach are NaN. ``track.on_canvas`` splits the scores into those of the canvas and those of the text
  before it.
- In a single pass, ``model(ids)``, the last ``canvas_length`` tokens are the canvas, and the logits are those of the
  canvas; ``self_conditioning=`` gives the logits of the step before.
- ``run.undecided`` marks noise; ``track.decided``, ``track.renoised`` and ``track.edited`` follow a position from step
  to step. ``start_canvas=`` gives the first canvas.
- Each row has a separate random generator, which draws only until the row's canvas is finished, so its tokens do not
  depend on its batch. With the draws of transformers' ``generate`` in place of its own (hooks at
  ``denoise.hook_candidates`` and ``denoise.hook_renoise``), all eight stored runs agree in every pass.
- Differences from ``generate``: ``gen_length`` must be a multiple of ``canvas_length`` (transformers rounds it up), and
  the run's random numbers are sinklens's own.
- The full-size text model was built from sizes that third-party loaders list; the published config.json was not read.
- Not available: ``start_at_layer``, ``stop_at_layer``, the points of ``set_use_split_qkv_input`` and
  ``set_use_attn_in``, ``same_step=True``, which would need a second encoder pass, and interventions other than
  `MaskKeys`, `Hold` and `Ablate` (and what is short for them), `AblateValues`, `PatchHooks`, `Steer`, `ForceTokens`,
  `Renoise`, `Activations` and `MaskedLogits`.

DiffusionGemma's sampler: canvas after canvas of random tokens, without a mask token.

A *canvas* is `canvas_length` positions. It begins as tokens drawn uniformly from the vocabulary. In every step the
decoder sees the text before the canvas, which the encoder has written to a cache, and the canvas itself. From its
logits, divided by a temperature that falls with the steps, a token is drawn at every position. The positions of lowest
entropy are *accepted*: they get the drawn token. All others are *renoised*: they get a fresh random token. Acceptance
is not remembered, so a later step may renoise an accepted position. The logits of a step condition the next one
(*self-conditioning*). A row's canvas is finished when its most likely tokens and its entropy say so; it then waits for
the other rows. The most likely tokens, not the drawn ones, become part of the text, and the next canvas begins.

``denoise.hook_canvas`` is the text so far with the canvas of the step; the other points of the sampler have the
positions of the canvas only. The encoder runs in the first step of each canvas, over the text that is new; if an edit
changes tokens that it has read, it reads the text again.

Pitfall: in ``run.canvas``, positions that do not exist yet hold -1, which is not a token id.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import Family
from sinklens.sampling import decisions
from sinklens.sampling.parts import multiples
from sinklens.sampling.random_canvas import RandomCanvas, random_tokens
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, NonNegative, Positive


@dataclass(frozen=True)
class DiffusionGemmaSettings(RandomCanvas):
    """DiffusionGemma's sampler (transformers' ``DiffusionGemmaForBlockDiffusion.generate``; bound of 2505.24857).

    The settings have the names of transformers' generation config. Passing ``gen_length`` does not change the number of
    steps per canvas: every canvas takes up to ``max_denoising_steps``.

    Attributes:
        gen_length: number of answer positions, a multiple of `canvas_length`.
        canvas_length: positions that are denoised together; the checkpoint's value fits its training.
        max_denoising_steps: largest number of steps per canvas.
        entropy_bound: a step accepts the positions of lowest entropy as long as the entropies of those before add up to
            at most this, in nats.
        t_min, t_max: the temperature falls linearly from `t_max` in a canvas's first step towards `t_min`.
        stability_threshold: a row's canvas is finished if the most likely tokens did not change for this many steps,
            and its entropy is below `confidence_threshold`; 0 leaves the decision to the entropy.
        confidence_threshold: mean entropy per position, in nats.
        pad_token_id: replaces the tokens that follow an end token; None keeps them.
    """

    name: ClassVar = "diffusion-gemma"
    attention: ClassVar = ("encoder-decoder",)
    masked: ClassVar = False
    gen_length: Count = 256
    canvas_length: Count = 256
    max_denoising_steps: Count = 48
    entropy_bound: Positive = 0.1
    t_min: NonNegative = 0.4
    t_max: NonNegative = 0.8
    stability_threshold: Annotated[int, Ge(0)] = 1
    confidence_threshold: NonNegative = 0.005
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.gen_length % self.canvas_length == 0,
            f"gen_length {self.gen_length} is not a multiple of canvas_length {self.canvas_length}, and only complete "
            f"canvases are generated; choose {multiples(self.gen_length, self.canvas_length)}.",
        )
        require(
            self.t_min < self.t_max,
            f"t_min and t_max must satisfy 0 <= t_min < t_max; got {self.t_min!r} and {self.t_max!r}.",
        )

    @property
    def positions_per_block(self) -> int:
        return self.canvas_length

    @property
    def steps(self) -> int:
        """Largest number of steps of the complete generation."""
        return self.gen_length // self.canvas_length * self.max_denoising_steps

    def temperature(self, step: int) -> float:
        """The temperature of step `step` of a canvas, counted from 0."""
        return self.t_min + (self.t_max - self.t_min) * ((self.max_denoising_steps - step) / self.max_denoising_steps)

    def denoise(self, state: State) -> Iterator[None]:
        require(
            state.canvas.shape[1] == state.prompt_length + self.gen_length,
            "an intervention puts tokens after the answer, but this model reads nothing that follows its canvas; "
            "put them before the prompt.",
        )
        self.check_start(state)
        state.cache_keys(read=state.tree.canvas_pass.encode)
        ended = torch.zeros(len(state.canvas), dtype=torch.bool, device=state.canvas.device)
        for start in range(state.prompt_length, state.canvas.shape[1], self.canvas_length):
            block = _OpenCanvas(state, self, start)
            state.canvas = self.begun(state, start)
            state.undecided = state.canvas < 0
            state.undecided[:, start:] = True
            for step in range(self.max_denoising_steps):
                yield
                block.run(step, ended)
                if block.over:
                    break
            canvas = state.canvas[:, start : start + self.canvas_length]
            ended = ended | decisions.among(canvas, state.eos_ids).any(dim=1)
            if bool(ended.all()):
                return


class _OpenCanvas:
    """One canvas while it is denoised.

    Attributes:
        final: the most likely tokens of every row, which become part of the text.
        over: whether the last step has run.
    """

    def __init__(self, state: State, settings: DiffusionGemmaSettings, start: int) -> None:
        self._state, self._settings, self._start = state, settings, start
        self._stop = start + settings.canvas_length
        rows, device = len(state.canvas), state.canvas.device
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._history: list[Tensor] = []
        self._logits: Tensor | None = None
        self.final, self.over = state.canvas[:, start : self._stop], False

    def run(self, step: int, ended: Bool[Tensor, " batch"]) -> None:
        """Run one step; the last one of a canvas leaves its most likely tokens."""
        state, waiting = self._state, self._finished
        text = state.begin_step(slice(self._start, self._start), self._stop)[:, : self._stop]
        state.active = ~waiting
        canvas, real = text[:, self._start :], state.real[:, : self._stop]
        assert state.keys is not None
        if state.keys.first(text) < self._start:
            state.keys.hidden(text, real)
        hidden = state.tree.canvas_pass.decode(canvas, real, state.keys.store, self._logits)
        logits = state.checked(state.through("hook_logits", state.tree.head(hidden)))
        logits = logits / self._settings.temperature(step)
        sampled = state.ids_at(state.tree.denoise.hook_candidates, self._draw(logits, canvas))
        logs = logits.log_softmax(dim=-1)
        entropy = state.through("hook_entropy", -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(dim=-1))
        accepted = state.through(
            "hook_accepted", decisions.within_bound(-entropy, entropy, self._settings.entropy_bound)
        )
        active = self._state.active[:, None].expand_as(canvas)
        noise = state.ids_at(
            state.tree.denoise.hook_renoise, canvas.masked_scatter(active, random_tokens(self._state, active))
        )
        left = torch.where(accepted, sampled, noise)
        self._finish(logits, entropy)
        self.over = self._is_last(step)
        self._leave(text, torch.where(waiting[:, None], canvas, left), self._undecided(~accepted, waiting), ended)

    def _is_last(self, step: int) -> bool:
        """Whether step `step` is the last one of the canvas; a replay decides it by what it did next."""
        replay, done = self._state.replay, self._state.steps_done + 1
        if replay is None or done >= replay.shape[1]:
            return step == self._settings.max_denoising_steps - 1 or bool(self._finished.all())
        if self._stop == replay.shape[2]:
            return done == replay.shape[1] - 1
        return bool((replay[:, done, self._stop] >= 0).any())

    def _draw(self, logits: Float[Tensor, "batch pos vocab"], canvas: Tensor) -> Int[Tensor, "batch pos"]:
        """A token at every position; rows that wait keep theirs and draw no random numbers."""
        active = self._state.active[:, None].expand_as(canvas)
        noise = self._state.noise.uniform(active, dtype=torch.float64)
        drawn = decisions.categorical_candidates(logits[active].softmax(dim=-1, dtype=torch.float32), noise)
        return canvas.masked_scatter(active, drawn)

    def _finish(self, logits: Float[Tensor, "batch pos vocab"], entropy: Float[Tensor, "batch pos"]) -> None:
        """Update the most likely tokens, the logits for the next step, and which rows are finished."""
        settings, waiting = self._settings, self._finished
        best = torch.where(waiting[:, None], self.final, logits.argmax(dim=-1))
        embedded = logits.to(self._state.tree.cfg.dtype)
        self._logits = embedded if self._logits is None else torch.where(waiting[:, None, None], self._logits, embedded)
        stable = torch.full_like(waiting, len(self._history) >= settings.stability_threshold)
        for earlier in self._history[len(self._history) - settings.stability_threshold :]:
            stable &= (earlier == best).all(dim=1)
        self._history.append(best)
        self._finished = waiting | (stable & (entropy.mean(dim=1) < settings.confidence_threshold))
        self.final = best

    def _undecided(
        self, noisy: Bool[Tensor, "batch canvas"], waiting: Bool[Tensor, " batch"]
    ) -> Bool[Tensor, "batch pos"]:
        """The undecided positions of the text after this step, without the end of the canvas."""
        assert self._state.undecided is not None
        undecided = self._state.undecided.clone()
        before = undecided[:, self._start : self._stop]
        undecided[:, self._start : self._stop] = torch.where(waiting[:, None], before, noisy)
        return undecided

    def _leave(self, text: Tensor, left: Tensor, undecided: Bool[Tensor, "batch pos"], ended: Tensor) -> None:
        """End the step with `left` on the canvas, or after the last step with the final tokens."""
        canvas = self._state.canvas.clone()
        canvas[:, : self._stop] = text
        if self.over:
            left = self.final = _padded(self._state, self._settings, self.final, ended)
            undecided[:, self._start : self._stop] = False
        canvas[:, self._start : self._stop] = left
        self._state.end_step(canvas, undecided)


def _padded(
    state: State, settings: DiffusionGemmaSettings, tokens: Int[Tensor, "batch pos"], ended: Bool[Tensor, " batch"]
) -> Int[Tensor, "batch pos"]:
    """`tokens` with padding after the first end token, and everywhere in rows that ended in an earlier canvas."""
    if settings.pad_token_id is None:
        return tokens
    ends = decisions.among(tokens, state.eos_ids).long()
    return tokens.masked_fill((ends.cumsum(dim=1) - ends > 0) | ended[:, None], settings.pad_token_id)


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "moe_intermediate_size", "num_experts", "top_k_experts", "sliding_window", "rms_norm_eps", "layer_types",
    "final_logit_softcapping", "rope_parameters.full_attention.rope_theta",
    "rope_parameters.full_attention.rope_type", "rope_parameters.full_attention.partial_rotary_factor",
    "rope_parameters.sliding_attention.rope_theta",
)  # fmt: skip
_OF_LAYERS = ("num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim")
"""Keys that later versions of transformers write for each layer."""
FAMILIES = (
    Family(
        name="diffusion-gemma",
        model_types=("diffusion_gemma",),
        architecture="diffusion_gemma",
        sampler="diffusion-gemma",
        verified="logits, patterns, routing and, given its draws, every pass of generate equal transformers' own on "
        "tiny weights",
        model_class="AutoModelForMultimodalLM",
        class_attention="encoder-decoder",
        masked=False,
        required={"text_config.use_bidirectional_attention": ("vision", None)},
        needed=(
            "canvas_length",
            *(f"text_config.{key}" for key in _SIZES),
            *(f"text_config.{key} or text_config.per_layer_config" for key in _OF_LAYERS),
        ),
        config_settings={"canvas_length": "canvas_length"},
        generation_settings={
            "max_new_tokens": "gen_length",
            "max_denoising_steps": "max_denoising_steps",
            "sampler_config.entropy_bound": "entropy_bound",
            "t_max": "t_max",
            "t_min": "t_min",
            "stability_threshold": "stability_threshold",
            "confidence_threshold": "confidence_threshold",
            "pad_token_id": "pad_token_id",
        },
        refused_tokens={"image_token_id": "image"},
        bound="",
        own_classes=("DiffusionGemmaForBlockDiffusion",),
        checkpoints="DiffusionGemma (text only)",
        parameters=(25_250_986_752,),
    ),
)
SAMPLERS = (DiffusionGemmaSettings,)
