"""When is the answer known? The prediction at every position of every step, and when a run could have stopped.

A diffusion model predicts a token at every position in every step, even where the sampler has not decided yet.
`step_predictions` reads these predictions from a run. From them follow

    settling step   the first step after which the prediction at a position is the final token at every later step
    guess           the canvas of a step, with every undecided position of the answer filled by its prediction
    emergence       the first step whose guess is a right answer; and the one from which on all guesses are right
    early exit      the first step at which a rule is satisfied, and the guess that it would return

The rule of `early_exit` is the *gap*: at every undecided position the probability of the first token exceeds that of
the second by a threshold.

Answers known early: Li et al., 2508.19982.

Pitfalls: a position that is decided keeps its token, so it has settled by then at the latest; compare with
`decided_step`. The step of emergence depends on the true answer, which a user of the model does not have; an early exit
does not. A threshold that was chosen on some prompts has to be tested on others.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from jaxtyping import Int

from sinklens.errors import SettingError, require
from sinklens.experiments.lens import logit_lens
from sinklens.utils.arguments import checked

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

IsRight = Callable[[int, str], bool]
"""Whether a text is a right answer to the prompt of a row, ``right(row, text)``."""


@checked
def step_predictions(run: "Generation") -> xr.Dataset:
    """The prediction at every position of every step, one pass of the unchanged model per row and step.

    Returns:
        A Dataset over ``batch``, ``step`` and ``pos`` (columns of the canvas): ``token``, the most likely one; its
        ``probability``; ``gap``, how far the probability of the second is below it; ``entropy`` in nats; ``masked``,
        whether the position is undecided; ``token_id`` of the canvas. Over ``batch`` and ``pos``: ``final_token`` and
        ``decided_step``. ``answer`` [pos] is True after the prompt. Ids are -1 and the rest NaN on padding.

    Raises:
        SettingError: an autoregressive run, which predicts one token per step, or a run whose steps a separate pass
            cannot repeat.
    """
    require(
        not run.causal,
        "an autoregressive run predicts only the next token at each step, so it has no predictions of the rest of "
        "its answer; use a diffusion model.",
    )
    last, length, rows = run.model.cfg.n_layers - 1, run.canvas.shape[2], []
    for row in range(len(run.canvas)):
        lens = logit_lens(run.model, run, layers=[last], row=row, top_k=2).isel(layer=0, drop=True)
        lens = lens[["token", "probability", "entropy"]].assign_coords(pos=lens["column"].to_numpy())
        rows.append(lens.drop_vars("column").reindex(pos=np.arange(length), fill_value={"token": -1}))
    both = xr.concat(rows, "batch").drop_vars(["pos", "rank"])
    found = both.isel(rank=0).assign(gap=both["probability"].isel(rank=0) - both["probability"].isel(rank=1))
    axes, masked = ("batch", "step", "pos"), run.undecided[:, :-1] & run.real[:, None]
    found["masked"], found["token_id"] = (axes, masked.cpu().numpy()), (axes, run.canvas[:, :-1].cpu().numpy())
    found["final_token"], found["decided_step"] = (
        (("batch", "pos"), ids.cpu().numpy()) for ids in (run.tokens, run.unmask_step)
    )
    return found.assign(answer=("pos", np.arange(length) >= run.prompt_length)).drop_attrs()


@checked
def settling_steps(predictions: xr.Dataset) -> Int[xr.DataArray, "batch pos"]:
    """The first step from which on the prediction is the final token, until the position is decided.

    It is the number of steps where even the last prediction differs from the final token (the sampler drew another
    one); -1 outside the answer.
    """
    other = (predictions["token"] != predictions["final_token"]) & (predictions["step"] <= predictions["decided_step"])
    steps = predictions.sizes["step"]
    last = xr.where(other, predictions["step"], -1).max("step")
    inside = predictions["answer"] & (predictions["decided_step"] >= 0)
    never = last >= predictions["decided_step"]
    return xr.where(inside, xr.where(never, steps, last + 1), -1).transpose("batch", "pos")


@checked
def guesses(run: "Generation", predictions: xr.Dataset) -> list[list[str]]:
    """The answer's text by row and step, undecided positions filled by their predictions, up to the end token.

    Raises:
        SettingError: the model has no tokenizer.
    """
    tokenizer = run.model.tokenizer
    if tokenizer is None:
        raise SettingError(f"{run.model.name} has no tokenizer, so its guesses have no text; compare ids instead.")
    ids = xr.where(predictions["masked"], predictions["token"], predictions["token_id"]).to_numpy()
    ends = set(run.model.eos_token_ids)
    answer = slice(run.prompt_length, run.prompt_length + run.settings.gen_length)

    def text(tokens: Sequence[int]) -> str:
        end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return str(tokenizer.decode([token for token in tokens[:end] if token >= 0], skip_special_tokens=False))

    return [[text(step[answer].tolist()) for step in row] for row in ids]


@checked
def answer_emergence(run: "Generation", predictions: xr.Dataset, right: IsRight) -> xr.Dataset:
    """When a right answer can be read from the predictions.

    Returns:
        A Dataset: ``right`` [batch, step] of the guesses; ``final`` [batch] of the answers; ``first``, the first step
        whose guess is right, and ``stable``, the first from which on all guesses are, as shares of the steps that the
        row had [batch]. NaN where there is none.
    """
    judged = np.array([[right(row, text) for text in texts] for row, texts in enumerate(guesses(run, predictions))])
    judged = judged.reshape(len(run.canvas), run.steps_run).astype(bool)
    active, final = run.active.cpu().numpy(), np.array([right(row, a.text or "") for row, a in enumerate(run.answers)])
    steps, before = active.sum(axis=1), active.cumsum(axis=1) - active  # the row's own steps, without those it waits
    there, wrong = judged & active, np.where(~judged & active, before + 1, 0).max(axis=1)
    first = np.where(there.any(axis=1), before[np.arange(len(before)), there.argmax(axis=1)], np.nan)
    stable = np.where(final & (wrong < steps), wrong, np.nan)
    data = {"right": (("batch", "step"), judged), "final": ("batch", final.astype(bool))}
    shares = {"first": ("batch", first / steps), "stable": ("batch", stable / steps)}
    return xr.Dataset(data | shares, {"step": predictions["step"]})


@checked
def early_exit(
    run: "Generation",
    predictions: xr.Dataset,
    right: IsRight,
    thresholds: Sequence[float | int] = (0.5, 0.8, 0.9, 0.99),
) -> xr.Dataset:
    """What stopping early would have returned, at each threshold of the gap; see the module.

    Args:
        right: see `IsRight`.
        thresholds: gaps of probability, one or several, above 0 and at most 1.

    Returns:
        A Dataset over ``threshold`` and ``batch``: ``exit``, the number of steps that would have run; ``share``, that
        number over the steps of the row; ``right``, whether the guess after the last of them is right; ``same``,
        whether it is the row's own answer. ``full`` [batch]: whether the answer of the complete run is right. Where the
        rule is never satisfied, all steps run and the answer is that of the complete run.

    Raises:
        SettingError: a threshold out of range.
    """
    require(
        all(0 < threshold <= 1 for threshold in thresholds) and len(thresholds),
        f"thresholds are above 0 and at most 1; got {list(thresholds)}.",
    )
    texts, active = guesses(run, predictions), run.active.cpu().numpy()
    undecided = predictions["gap"].where(predictions["masked"] & predictions["answer"])
    smallest = undecided.min("pos").transpose("batch", "step").to_numpy()  # NaN where all are decided
    own = [answer.text or "" for answer in run.answers]
    exits, returned = np.tile(active.sum(axis=1), (len(thresholds), 1)), [list(own) for _ in thresholds]
    for number, threshold in enumerate(thresholds):
        for row, stops in enumerate(~(smallest < threshold) & active):
            if stops.any():
                exits[number, row] = active[row, : stops.argmax() + 1].sum()
                returned[number][row] = texts[row][stops.argmax()]
    judged = [[bool(right(row, text)) for row, text in enumerate(answers)] for answers in [own, *returned]]
    same = [[text == other for text, other in zip(answers, own, strict=True)] for answers in returned]
    found = {"exit": exits, "right": judged[1:], "same": same, "share": exits / active.sum(axis=1)}
    data = {name: (("threshold", "batch"), values) for name, values in found.items()}
    return xr.Dataset(data | {"full": ("batch", judged[0])}, {"threshold": list(thresholds)})
