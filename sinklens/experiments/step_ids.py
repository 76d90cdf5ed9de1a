"""The input of a denoising step, for a separate pass over its canvas.

Pitfall: hooks of the run are not applied in such a pass, so after an intervention it shows the unchanged model on the
canvas that the changed one made.
"""

from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.runs.intervention import within
from sinklens.utils.arguments import checked

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


class StepIds(NamedTuple):
    """The input of a step.

    Attributes:
        ids: the canvas.
        attention_mask: False on left padding.
        time: noise level of each row; None where the sampler sets none.
    """

    ids: Int[Tensor, "batch pos"]
    attention_mask: Bool[Tensor, "batch pos"]
    time: Float[Tensor, " batch"] | None = None

    def row(self, number: int) -> "StepIds":
        """One row, without its padding."""
        keep = self.attention_mask[number]
        time = None if self.time is None else self.time[[number]]
        return StepIds(self.ids[number][keep][None], keep[keep][None], time)

    def columns(self, number: int) -> list[int]:
        """Canvas columns of the tokens of `row(number)`; there may be padding on both sides of them."""
        return self.attention_mask[number].nonzero()[:, 0].tolist()

    def place(self, number: int, column: int) -> int:
        """Index in `row(number)` of the token in a canvas column.

        Raises:
            SettingError: the column holds no token at this step.
        """
        columns = self.columns(number)
        require(
            column in columns,
            f"position {column} does not exist at this step, is padding or is not decoded yet; choose one of "
            f"{columns[0]} to {columns[-1]}.",
        )
        return columns.index(column)


@checked
def of_step(run: "Generation", step: int) -> StepIds:
    """The canvas at the start of a step, for a separate pass; for an autoregressive run the text so far.

    Negative steps count from the last step that ran.

    Raises:
        SettingError: the step did not run, or its pass saw a window of the text.
    """
    require(
        not run.settings.slides,
        f"a step of the {run.settings.name} sampler sees a window of the text, and a separate pass sees all of it. "
        f"Keep the values of the run itself with Activations or LogitLens in hooks=.",
    )
    step = within("step", [step], run.steps_run)[0]
    end = run.prompt_length + step if run.causal else run.canvas.shape[2]
    device = run.model.cfg.device
    time = run.time_at(step)
    time = None if time is None else time.to(device)
    return StepIds(run.canvas[:, step, :end].to(device), run.real[:, :end].to(device), time)


def exact_step(run: "Generation", step: int) -> StepIds:
    """`of_step`, if a separate pass over it computes what the run computed at the step, apart from hooks.

    Raises:
        SettingError: also if the step read what an earlier one computed: keys and values under a cache policy, or the
            predictions of the step before; or if attention changes from pass to pass.
    """
    require(
        not run.model.tree.changes_attention,
        f"the attention of {run.model.family} models changes from pass to pass, and the tools that compute a step "
        f"again have one rule for all steps. Keep the values of the run itself with Activations in hooks=.",
    )
    require(
        not run.key_reuse,
        f"with {run.key_reuse}, steps read keys and values as earlier steps computed them, so a separate pass over "
        f"a canvas has different attention and streams from the run. Analyze an exact run on the same canvases: "
        f"repeat the run without {run.key_reuse.partition('=')[0]}= and with replay=run.",
    )
    require(
        not run.model.tree.architecture.encoder,
        f"a step of a {run.model.family} model also reads the predictions of the step before, which a separate "
        f"pass over a canvas lacks; keep the values of the run itself with Activations in hooks=.",
    )
    return of_step(run, step)
