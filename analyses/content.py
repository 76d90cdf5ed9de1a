"""Are strongest keys missed for being sinks, or for what their tokens say?

    sinklens analyse content tiny-llada tiny-mmada tiny-dream --limit 50

A digit that an answer has to copy is attended to for its content, and is often a sink too (Rulli et al., 2510.15731,
Eq. 3). At every step, this study masks each head's strongest key of the unchanged run's previous step: all of them;
only digits, or only other tokens; and of these only sinks, or only keys that are not sinks. In the heads and steps of
each cell of this table it also makes other changes. It replaces only the *value* of the key by the row's mean value and
leaves the attention unchanged (is the message missed, or the attention?), and it masks or replaces other keys as
controls. The controls are weaker than the key that they stand for and are the same at every step. Three more controls
mask random keys that are not sinks and receive as much attention, over all heads of a layer (mass.py): keys of any
kind, digits only, and other tokens only. The last two differ in kind alone: do digits cost more than other tokens if
neither are sinks and both receive the same attention?

Caveat: the cells are not the same heads and steps, and ``share`` differs: compare a cost with that of its controls
first, and see in ``controls`` how many of their keys exist. A name or a noun is copied too, so "not digit" is not free
of content.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import costs_over, unchanged
from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.mass import MEANING, REMOVED, attended, removed_by, same_mass_name, share_of, with_same_mass
from sinklens.analyses.study import Study
from sinklens.interventions import AblateValues, MaskSinks
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import EpsilonOverMean, SinkTrack, StrongestKeys
from sinklens.sinks.strongest import Marked, Part

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

PARTS: dict[Part, str] = {
    "all": "in every head and step",
    "sink": "where it is a sink",
    "other": "where it is not a sink",
}
CHANGES = {
    "mask": "attention to the strongest key masked",
    "value": "value of the strongest key replaced by the mean",
    "mask_random": "attention to a random weaker key masked",
    "mask_kind": "attention to a random weaker key of the same kind masked",
    "value_random": "value of a random weaker key replaced by the mean",
    "mask_mass": f"attention to {MEANING} masked",
    "mask_mass_kind": f"attention to {MEANING}, of the study's kind, masked",
    "mask_mass_rest": f"attention to {MEANING}, of other kinds, masked",
}
AMONG = {"mask_mass": "", "mask_mass_kind": "kind", "mask_mass_rest": "rest"}
"""Changes of as much attention -> which keys they choose among, as `with_same_mass` names them."""
CLAIMS = {
    "masking costs more than masking a random key": ("mask", "mask_random"),
    "… than masking a random key of the same kind": ("mask", "mask_kind"),
    "… than masking as much attention to keys that are no sinks": ("mask", "mask_mass"),
    "… than masking as much attention to {kind} keys that are no sinks": ("mask", "mask_mass_kind"),
    "… than masking as much attention to other keys that are neither {kind} keys nor sinks": ("mask", "mask_mass_rest"),
    "with as much attention to keys that are no sinks, {kind} keys cost more than others":
        ("mask_mass_kind", "mask_mass_rest"),
    "the value costs more than that of a random key": ("value", "value_random"),
    "masking costs more than replacing the value": ("mask", "value"),
}  # fmt: skip
MEASURES = {
    "cost": "share of word problems lost",
    "right": "share of word problems answered right",
    "changed": "share of answers that change",
}
CONTROLS = {"control_found": "control keys found, per key that they control for"}
MASS = {"removed": REMOVED}
SHARE = {"share": "share of all heads and steps"}
BASE = {"base": "share of word problems answered right with nothing changed"}


@dataclass
class Content(Study):
    """See the module.

    Attributes:
        kind: the kind of token that is compared with all others.
    """

    name: ClassVar[str] = "content"
    scored: ClassVar[str] = "all"
    needs_complete_passes: ClassVar[str] = (
        "values are replaced in passes over the complete text, and its steps compute those of their canvas alone"
    )
    together: ClassVar[bool] = False
    kind: str = "digit"

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The kinds compared, and how `StrongestKeys` names them."""
        return {"any": (), self.kind: (self.kind,), f"not {self.kind}": (f"not {self.kind}",)}

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`MEASURES`, `CONTROLS` and `MASS` [kind, part, change]; ``share`` [kind, part]; and ``base``. The mass is
        that of masked keys, NaN for keys that are drawn in the run.
        """
        axes: dict[str, list[Any]] = {"kind": list(self.kinds), "part": list(PARTS), "change": list(CHANGES)}
        base = unchanged(self, model, prompt, settings)
        mass = attended(self, model, prompt, settings, base)
        keys = {f"{kind} {part}": self.keys(kind, part).detect(base) for kind, part in product(self.kinds, PARTS)}
        track = with_same_mass(base, keys, EpsilonOverMean().detect(base), mass, self.seed, self._among(base))
        listed = {f"{cell} {change}": hook for cell in keys for change, hook in self.interventions(track, cell).items()}
        found = costs_over(self, model, prompt, settings, axes, listed)
        chosen = {"mask": "{}"} | {change: same_mass_name("{}", among) for change, among in AMONG.items()}
        names = [chosen[change].format(cell) if change in chosen else None for cell in keys for change in CHANGES]
        shares = np.array([share_of(track, cell) for cell in keys]).reshape(len(self.kinds), len(PARTS))
        gone = removed_by(names, track, mass).reshape(found["cost"].shape)
        return found.assign(removed=(tuple(axes), gone), share=(("kind", "part"), shares))

    def keys(self, kind: str, part: Part) -> StrongestKeys:
        """The keys of one cell: the strongest of all keys, split by kind."""
        return StrongestKeys(1, self.kinds[kind], part, overall=True)

    def _among(self, track: SinkTrack) -> dict[str, xr.DataArray]:
        """What the controls of equal mass choose among, beside all keys: those of the kind, and the rest."""
        of_kind = StrongestKeys(track.data.sizes["pos"], self.kinds[self.kind]).detect(track)
        return {"kind": of_kind, "rest": ~of_kind}

    def interventions(self, track: SinkTrack, cell: str) -> dict[str, Any]:
        """One intervention per entry of `CHANGES`, on the keys that `track` marks as `cell`."""
        shared: dict[str, Any] = {"top_k": None, "source": track, "seed": self.seed}
        keys = shared | {"detector": Marked(cell)}
        rest = keys | {"pick": "random", "persistent": True}
        return {
            "mask": MaskSinks(**keys),
            "value": AblateValues(**keys),
            "mask_random": MaskSinks(**rest),
            "mask_kind": MaskSinks(**rest | {"pick": "same_kind"}),
            "value_random": AblateValues(**rest),
            **{
                change: MaskSinks(**shared, detector=Marked(same_mass_name(cell, among)))
                for change, among in AMONG.items()
            },
        }

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """The differences of costs that `claims` tests, by name; NaN for a model without a right answer."""
        return xr.Dataset(_paired(data, self.kind))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``: every measure by kind, part and change; ``shares``; ``claims``: paired differences of costs;
        ``controls``: how many control keys were found; ``removed``: the attention that masks remove.
        """
        listed = {"costs": [*MEASURES, *BASE], "shares": list(SHARE), "controls": list(CONTROLS), "removed": list(MASS)}
        tables = {name: interval_table(measured, found, self.seed) for name, found in listed.items()}
        tables["removed"] = tables["removed"].dropna(subset="estimate")
        meanings = MEASURES | BASE | SHARE | CONTROLS | MASS
        named = {
            name: table.assign(where=table["part"].map(PARTS), meaning=table["measure"].map(meanings))
            for name, table in tables.items()
        }
        return {**named, "claims": self.claims(measured)}

    def claims(self, measured: Mapping[str, xr.Dataset]) -> "DataFrame":
        """The paired differences of `contrasts`, corrected over all of a model."""
        paired = {model: self.contrasts(data) for model, data in measured.items()}
        ranges = dict.fromkeys(map(str, next(iter(paired.values()))), (-1, 1))
        return judged(interval_table(paired, [*ranges], self.seed, ranges, null=0.0))

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost, a row per model and a panel per kind."""
        from sinklens.analyses.figures import interval_panels

        table = interval_table(measured, ["cost"], self.seed)
        costs = interval_panels(table, MEASURES, along="part", by="change", series=CHANGES, panel="kind", names=PARTS)
        return {"costs": costs}


def _paired(data: xr.Dataset, kind: str) -> dict[str, xr.DataArray]:
    """The claims, and the differences of costs that are above 0 if they hold; NaN without a right answer."""
    cost = data["cost"] if bool((data["base"] > 0).any()) else data["cost"] * np.nan
    other = f"not {kind}"

    def above(first: tuple[str, str, str], second: tuple[str, str, str]) -> xr.DataArray:
        """Cost of one cell and change minus that of another."""
        one, than = (cost.sel(dict(zip(("kind", "part", "change"), cell, strict=True))) for cell in (first, second))
        return (one - than).drop_vars(["kind", "part", "change"], errors="ignore")

    compared = {
        f"a {kind} that is a sink costs more than one that is not": ((kind, "sink"), (kind, "other")),
        "another token that is a sink costs more than one that is not": ((other, "sink"), (other, "other")),
        f"among sinks, a {kind} costs more than another token": ((kind, "sink"), (other, "sink")),
        f"among others, a {kind} costs more than another token": ((kind, "other"), (other, "other")),
    }
    found = {claim: above((*one, "mask"), (*than, "mask")) for claim, (one, than) in compared.items()}
    for name, part in product((kind, other), ("sink", "other")):
        where = f"{name}, {PARTS[part]}"  # type: ignore[index]
        for claim, (change, control) in CLAIMS.items():
            found[f"{where}: {claim.format(kind=kind)}"] = above((name, part, change), (name, part, control))
    return found
