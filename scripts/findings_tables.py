"""The tables of docs/findings.md and its supplement: which stored numbers each one holds. findings.py writes them."""

from dataclasses import dataclass
from typing import Any

from sinklens.analyses.scales import DIFFERENCE, LINEAR, LOG, SHARE, Scale

MODELS = ("tiny-llada", "tiny-dream", "tiny-mmada", "tiny-llama")


@dataclass(frozen=True)
class Row:
    """One row: a label, and for each model the estimate and interval of the stored row with these values.

    Attributes:
        label: first cell.
        where: column -> value; the row of each model must be unique.
        scale: factor, e.g. 100 for percent.
        digits: decimals.
        file: stored table without ``.csv``; by default the table's.
    """

    label: str
    where: dict[str, Any]
    scale: float = 1.0
    digits: int = 2
    file: str | None = None


@dataclass(frozen=True)
class Contrast(Row):
    """A row of the table of seeds: a measure of each model that says something by being above or below a threshold.

    Attributes:
        threshold: what it is compared with.
        tests: whether it tests the claim that the page's first table makes of its study.
        on: scale of the interval over the seeds.
    """

    threshold: float = 0.0
    tests: bool = True
    on: Scale = LINEAR


@dataclass(frozen=True)
class Table:
    """One table of the page.

    Attributes:
        file: name of the stored table, without ``.csv``.
        rows: its rows.
        models: its columns.
        counted: whether each cell says from how many prompts it is, because the rows differ.
        comparable: a matched cell is empty if a smaller share of the sinks or landings has a place to compare with.
    """

    file: str
    rows: tuple[Row, ...]
    models: tuple[str, ...] = MODELS
    counted: bool = False
    comparable: float = 0.25


def percent(label: str, digits: int = 1, **where: Any) -> Row:
    """A row in percent."""
    return Row(label, where, 100.0, digits)


def plain(label: str, digits: int = 2, **where: Any) -> Row:
    """A row in the stored unit."""
    return Row(label, where, 1.0, digits)


def contrast(
    file: str, label: str, threshold: float = 0.0, scale: float = 1.0, digits: int = 2, tests: bool = True, **where: Any
) -> Contrast:
    """A row of the table of seeds: ratios have the threshold 1, shares and their differences are in percent."""
    bounded = SHARE if where.get("measure") == "heads" else DIFFERENCE
    on = LOG if threshold == 1 else bounded if scale == 100 or where.get("measure") == "within" else LINEAR
    return Contrast(label, where, scale, digits, file, threshold, tests, on)


DIFFUSION = MODELS[:3]
TEXTS = ("tiny-text", "tiny-text-causal")
TEXT_KINDS = ("any", "delimiter", "start", "mask", "digit", "word")
CACHED = (*DIFFUSION, "tiny-llada-moe")
WINDOWS = {"none": "all keys", "earlier": "earlier keys only", "later": "later keys only", "near": "near keys only"}
EQ3 = "epsilon-over-mean (sum, 3)"
WITHIN = "step, position, group"
MODE_CLAIMS = {
    "filling a block: strongest keys move more under denoising": ("strongest keys move, filling a block, points", 100),
    "swapping a token: strongest keys move more under denoising": ("… swapping a token, points", 100),
    "filling a block: sinks move more under denoising": ("sinks move, filling a block, points", 100),
    "swapping a token: sinks move more under denoising": ("… swapping a token, points", 100),
    "hiding sinks costs more than as many random keys, more so under denoising":
        ("hiding sinks, beyond random keys, nats per token", 1),
    "hiding sinks costs more than random keys with as much attention, more so under denoising":
        ("… beyond keys with as much attention, nats per token", 1),
    "masking sinks loses more answers than as many random keys, more so under denoising":
        ("answers lost by masking sinks, beyond random keys, points", 100),
    "masking sinks loses more answers than random keys with as much attention, more so under denoising":
        ("… beyond keys with as much attention, points", 100),
    "sinks are strong in the same heads in both modes": ("rank correlation of heads, beyond shuffled heads", 1),
    "heads keep their key in both modes": ("heads with the same strongest key, beyond shuffled heads, points", 100),
}  # fmt: skip
TABLES: dict[str, Table] = {
    "edits": Table("groups/edits-jumps", (
        *(percent(label, measure="jump_share", edit=edit, lead=0.0) for label, edit in (
            ("a token decided, as in the run", "decided"),
            ("the same tokens in random order", "shuffled"),
            ("another problem's answer", "another answer"),
            ("a token decided, later queries", "decided, later"),
            ("a token of the prompt replaced, later queries", "prompt token"),
            ("a token of the answer replaced, later queries", "answer token"),
            ("an operand replaced, later queries", "operand"),
        )),
        percent("a token decided, jumps with a lead above 1", measure="jump_share", edit="decided", lead=1.0),
        percent("of the jumps when a token is decided: lead below 0.1", measure="near_tie_share", edit="decided"),
    )),
    "matched": Table("groups/token_types-matched", (
        *(plain(f"sinks on {kind}s ÷ other tokens, {label}", measure="ratio", by="kind", set=kind, matched=matched)
          for kind in ("mask", "digit")
          for label, matched in (("all places", "nothing"), ("same step and place", "step, position"),
                                 ("… and template", WITHIN))),
        *(Row(f"landings on just-decided ÷ {name}, same step, place and template",
              {"measure": "ratio", "others": others, "matched": WITHIN}, 1.0, 1, "groups/events-landings")
          for name, others in (("all other answer tokens", "all"), ("those decided earlier", "decided earlier"),)),
        *(Row(f"score against deciding step, correlation, {label}", {"measure": measure}, 1.0, 2, "groups/events-order")
          for label, measure in (("same step and place", "within"), ("… and template", "within_group"))),
        Row("lens at undecided sinks of layer 1, same step, place and template, points",
            {"measure": "named_difference", "layer": 1, "matched": WITHIN}, 100.0, 0, "groups/masked_sinks-matched"),
    ), models=DIFFUSION, comparable=0.2),
    "modes": Table("modes-claims", tuple(
        contrast("modes-claims", f"{label}: denoising − causal" if " more" in claim else label,
                 scale=scale, digits=1 if scale == 100 else 2, measure="difference", claim=claim)
        for claim, (label, scale) in MODE_CLAIMS.items()
    ), models=("tiny-two-modes",)),
    "mode_costs": Table("modes-costs", (
        *(plain(f"nats lost by hiding the sinks of {of} passes, in {mode} passes", measure="nll", mode=stored,
                keys=keys, choice="sink")
          for of, keys, mode, stored in (("causal", "causal", "causal", "causal"),
                                         ("causal", "causal", "denoising", "denoise"),
                                         ("denoising", "denoise", "denoising", "denoise"))),
        *(Row(f"strongest key changes per step as decoded, {mode}, %",
              {"measure": "decoding_jump_share", "mode": stored}, 100.0, 1, "modes-decoding")
          for mode, stored in (("causal", "causal"), ("denoising", "denoise"))),
        *(Row(f"problems lost by masking {keys}, {mode}, %", {"measure": "lost", "mode": stored, "masked": masked},
              100.0, 0, "modes-answers")
          for mode, stored in (("causal", "causal"), ("denoising", "denoise"))
          for keys, masked in (("sinks", "sink"), ("random keys", "random"), ("as much attention", "same_mass"))),
    ), models=("tiny-two-modes",)),
    "texts": Table("texts-texts", (
        plain("loss, nats per token", 3, measure="nats"),
        *(row
          for kind in ("any", "delimiter", "start", "mask", "digit", "word")
          for row in (
              plain(f"{kind}: nats lost by hiding its sinks", 3, measure="cost", kind=kind, choice="sink"),
              plain("… as much attention to keys that are no sinks", 3, measure="cost", kind=kind, choice="same_mass"),
              Row("… difference", {"measure": f"hiding {kind} sinks costs more than hiding as much attention"}, 1.0, 3,
                  "texts-claims"),
              percent("… attention hidden, %", measure="removed", kind=kind, choice="sink"),
              percent("… heads with a sink, per place, %", measure="per_place", kind=kind),
          )),
        plain("log2 of what values write at sinks ÷ at other keys", measure="write_ratio"),
        percent("sinks that are no-ops, %", 2, measure="no_op_share"),
        *(Row(f"nats lost {when}, 10⁻³", {"measure": "stale_cost", "stale": stale}, 1e3, 2)
          for stale, when in (("sink", "if sinks are 8 tokens out of date"),
                              ("same_mass", "… if random keys with as much attention are"),
                              ("all", "… if all visible keys are"))),
        percent("attention to the sinks that are out of date, %", measure="stale_mass", stale="sink"),
        *(percent(f"strongest key changes, {label}, %", measure="jump_share", edit=edit, lead=0.0)
          for edit, label in (("edited, later", "a token replaced, later queries"),
                              ("edited", "a token replaced, all queries"),
                              ("revealed", "a mask revealed, all queries"))),
    ), models=TEXTS),
    "text_seeds": Table("", (
        *(contrast("texts-claims", f"{kind}: sinks cost more than as much attention, nats", digits=3,
                   measure=f"hiding {kind} sinks costs more than hiding as much attention") for kind in TEXT_KINDS),
        *(contrast("texts-claims", f"heads with a sink at a {kind}, beyond words, points", 0.0, 100.0, 1,
                   measure=f"a {kind} is a sink more often than a word") for kind in ("start", "mask", "delimiter")),
        contrast("texts-claims", "log2 of what values write at other keys ÷ at sinks",
                 measure="sinks write less than other keys"),
        contrast("texts-claims", "stale sinks cost more than as much stale attention, 10⁻³ nats", 0.0, 1e3,
                 measure="stale sinks cost more than as much stale attention"),
        *(contrast("texts-pairs", f"{kind}: sinks cost more than as much attention, nats: masked − causal", digits=3,
                   measure=f"hiding {kind} sinks, beyond as much attention")
          for kind in TEXT_KINDS if kind != "mask"),
        *(contrast("texts-pairs", f"heads with a sink at a {kind}, points: masked − causal", 0.0, 100.0, 1,
                   measure=f"heads with a sink at a {kind}") for kind in ("start", "delimiter", "word")),
        contrast("texts-pairs", "log2 of what values write at sinks ÷ at other keys: masked − causal",
                 measure="log2 of what sinks write"),
        contrast("texts-pairs", "strongest key changes, a token replaced, later queries, points: masked − causal", 0.0,
                 100.0, 1, measure="jumps, a token replaced, later queries"),
    ), (*TEXTS, " − ".join(TEXTS))),
    "swaps": Table("groups/swaps-swaps", (
        *(plain(f"heads with a sink at the place, {when} {swap}", measure=measure, swap=swap)
          for swap in ("digit → word", "digit → digit", "word → digit", "word → word")
          for when, measure in (("before", "sinks_before"), ("after", "sinks_after"))),
        *(Row(f"change: {swap}", {"measure": "change", "swap": swap}, 1.0, 2, "groups/swaps-beyond")
          for swap in ("digit → word, beyond digit → digit", "word → digit, beyond word → word",
                       "word → punctuation, beyond word → word")),
    )),
    "equal_mass": Table("groups/content-costs", (
        *(Row(f"{kind}, {part}: {label}", {"kind": kind, "part": part, "change": change, "measure": measure}, 100.0,
              digits, file)
          for kind in ("digit", "not digit") for part in ("sink", "other")
          for label, change, measure, digits, file in (
              ("problems lost, %", "mask", "cost", 0, "groups/content-costs"),
              ("… with as much attention to other keys masked", "mask_mass", "cost", 0, "groups/content-costs"),
              ("attention removed, %", "mask", "removed", 1, "groups/content-removed"),
              ("… from the other keys", "mask_mass", "removed", 1, "groups/content-removed"),
          )),
    ), models=DIFFUSION),
    "digits": Table("digits/content-costs", (
        *(Row(f"{keys}: {label}", {"kind": "digit", "part": part, "change": change, "measure": measure}, 100.0,
              digits, f"digits/content-{file}")
          for part, cell in (("sink", "strongest keys that are digits and sinks"),
                             ("other", "strongest keys that are digits, no sinks"))
          for change, keys in (("mask", cell), ("mask_mass_kind", "… as much attention to digits that are no sinks"),
                               ("mask_mass_rest", "… as much attention to other tokens that are no sinks"))
          for label, measure, digits, file in (("problems lost, %", "cost", 0, "costs"),
                                               ("attention removed, %", "removed", 2, "removed"))),
        *(Row(label, {"measure": f"digit, {part}: {claim}"}, 100.0, 0, "digits/content-claims")
          for part, label, claim in (
              ("where it is a sink", "points that digits cost more if they are sinks",
               "… than masking as much attention to digit keys that are no sinks"),
              ("where it is a sink", "… that digits cost more than other tokens if neither are sinks",
               "with as much attention to keys that are no sinks, digit keys cost more than others"),
          )),
    ), models=("tiny-llada", "tiny-dream")),
    "existence": Table(
        "existence-detectors",
        (
            percent("positions that are sinks, %", 2, measure="found", detector=EQ3),
            percent("heads and steps with a sink, %", measure="heads", detector=EQ3),
            percent("… with ε = 3 as a percentage of the row's attention", measure="heads",
                    detector="epsilon-over-mean (percent, 3)"),
            plain("value norm at sinks ÷ median of the row", measure="value_ratio", detector=EQ3),
            percent("positions that are no-op sinks, %", 2, measure="found", detector="no-op"),
        ),
    ),
    "motion": Table("dynamics-null", (
        percent("strongest key changes, % of steps", measure="jump_share", source="measured"),
        percent("… under the null", measure="jump_share", source="null model"),
        percent("… with the queries held fixed", measure="jump_share", source="queries held fixed"),
        percent("the same between steps with a sink, %", measure="sink_jump_share", source="measured"),
        percent("… under the null", measure="sink_jump_share", source="null model"),
        percent("heads whose strongest key never changes, %", measure="static_share", source="measured"),
        percent("… under the null", measure="static_share", source="null model"),
        percent("… with the queries held fixed", measure="static_share", source="queries held fixed"),
        *(Row(label, {"measure": "restricted_mean", "source": source}, 1.0, 1, "dynamics-lifetimes")
          for label, source in (("steps that a sink lasts (at most 24)", "measured"),
                                ("… under the null", "null model"))),
    )),
    "kinds": Table("token_types-matched", tuple(
        plain(label, measure="ratio", by="kind", set=kind, matched=matched)
        for kind in ("digit", "mask", "newline", "punctuation", "start")
        for label, matched in ((f"{kind}: crude", "nothing"), (f"{kind}: same step and place", "step, position"))
    )),
    "undecided": Table(
        "masked_sinks-matched",
        tuple(
            Row(f"{label}, layer {layer}", {"measure": measure, "layer": layer}, scale, digits, file)
            for label, measure, scale, digits, file in (
                ("lens, same step: sinks − others, points", "named_difference", 100.0, 0, "masked_sinks-layers"),
                ("lens, same step and place: sinks − others, points", "named_difference", 100.0, 0, None),
                ("value norm, same step and head: sinks ÷ others", "value_ratio", 1.0, 2, "masked_sinks-layers"),
            )
            for layer in range(4)
        ),
        DIFFUSION,
        counted=True,
    ),
    "order": Table("events-order", (
        plain("score against deciding step", measure="correlation"),
        plain("… position held fixed", measure="partial"),
        plain("… same step and place", measure="within"),
        Row("landings on just decided ÷ all others, crude",
            {"measure": "ratio", "others": "all", "matched": "nothing"}, 1.0, 1, "events-landings"),
        Row("… same step and place",
            {"measure": "ratio", "others": "all", "matched": "step, position"}, 1.0, 1, "events-landings"),
        Row("… before the decision: landings on tokens that the step decides ÷ others, same step and place",
            {"measure": "ratio", "age": 0}, 1.0, 1, "events-ages"),
        Row("… ÷ tokens decided earlier, same step and place",
            {"measure": "ratio", "others": "decided earlier", "matched": "step, position"}, 1.0, 1, "events-landings"),
        Row("… ÷ the same token written over an earlier one, crude",
            {"measure": "ratio", "others": "written over", "matched": "nothing"}, 1.0, 2, "events-landings"),
        Row("… same step and place",
            {"measure": "ratio", "others": "written over", "matched": "step, position"}, 1.0, 2, "events-landings"),
        Row("change of the embedding, just decided", {"measure": "change_just"}, 1.0, 2, "events-changes"),
        Row("… written over", {"measure": "change_written"}, 1.0, 2, "events-changes"),
    ), DIFFUSION),
    "content": Table(
        "content-costs",
        tuple(
            Row(f"{kind}, {place}: {what}", {"measure": "cost", "kind": kind, "part": part, "change": change}, 100.0, 0)
            for kind, part, place in (
                ("any", "all", "everywhere"),
                ("digit", "sink", "a sink"),
                ("digit", "other", "no sink"),
                ("not digit", "sink", "a sink"),
                ("not digit", "other", "no sink"),
            )
            for change, what in (
                ("mask", "masked"),
                ("value", "value replaced"),
                ("mask_random", "random key masked"),
                ("mask_kind", "random key of the kind masked"),
            )
        ),
        DIFFUSION,
    ),
    "thresholds": Table(
        "necessity-thresholds",
        tuple(
            Row(f"ε = {epsilon:g}: {what}", {"measure": "above_cost", "epsilon": epsilon, "pick": pick}, 100.0, 0)
            for epsilon in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
            for pick, what in (("strongest", "keys above ε"), ("random", "as many random keys"))
        ),
        ("tiny-llada", "tiny-dream", "tiny-llama"),
    ),
    "definitions": Table(
        "definitions-excess",
        tuple(
            Row(
                f"{definition}, {hidden}, {count} per head",
                {"measure": "cost", "definition": code, "reach": reach, "top_k": count}, 100.0, 0,
            )
            for code, definition in (
                ("columns_steady", "column sums, steady"), ("columns_step", "column sums, step before"),
                ("row_steady", "newest query's row, steady"), ("row_step", "newest query's row, step before"),
                ("first", "first tokens"),
            )
            for reach, hidden in (("all", "from all queries"), ("newest", "from the newest"))
            for count in (1, 5)
        ),
        ("tiny-llada", "tiny-llama"),
    ),
    "interaction": Table(
        "interaction-costs",
        (
            *(percent(f"answers right, {seen}", 0, measure="base", window=window) for window, seen in WINDOWS.items()),
            *(
                percent(f"points lost by masking, {seen}: {what}", 0, measure="cost", window=window, pick=pick)
                for window, seen in list(WINDOWS.items())[:2]
                for pick, what in (("strongest", "strongest keys"), ("random", "random keys"))
            ),
            *(
                plain(f"KL in nats, {seen}: {what}", measure="kl", window=window, pick=pick)
                for window, seen in WINDOWS.items()
                for pick, what in (("strongest", "strongest keys"), ("random", "random keys"))
            ),
        ),
        ("tiny-llada", "tiny-dream"),
    ),
    "features": Table(
        "features-measures",
        tuple(
            Row(f"{place}: {label}, {who}", {"measure": measure, "sae": sae, "role": role}, scale, digits)
            for sae, place in (("masked", "masked positions"), ("decided", "tokens"))
            for measure, label, scale, digits in (
                ("excess", "firing at sinks − other positions, points", 100.0, 1),
                ("follows", "firing at a place while a sink − while not, points", 100.0, 1),
                ("arrives", "rise of firing where a sink moves to, points", 100.0, 1),
                ("leaves", "fall of firing where it was, points", 100.0, 1),
                ("gone", "sinks gone when ablated, %", 100.0, 1),
                ("removed", "length removed from the stream", 1.0, 2),
                ("kl", "KL in nats", 1.0, 4),
                ("changed", "answers changed, %", 100.0, 0),
                ("cost", "answers lost, points", 100.0, 0),
            )
            for role, who in (("sink", "chosen"), ("control", "control"))
        ),
        ("tiny-llada",),
        counted=True,
    ),
    "writers": Table(
        "circuits-writers",
        tuple(
            Row(f"{name}, {place}: {label}", {"role": role, "place": code, "writer": writer})
            for role, name in (("strongest", "strongest sink"), ("mobile", "most mobile sink"))
            for code, place in (("sink", "its key"), ("control", "control key"))
            for writer, label in (("head", "heads"), ("mlp", "MLPs"))
        ),
        DIFFUSION,
        counted=True,
    ),
    "readers": Table(
        "circuits-readers",
        tuple(
            Row(f"{name}, {place}: {label}", {"role": role, "place": code, "reader": reader}, 1.0, 4)
            for role, name in (("strongest", "strongest sink"), ("mobile", "most mobile sink"))
            for code, place in (("sink", "its key"), ("control", "control key"))
            for reader, label in (
                ("all", "all later components"), ("queries", "queries of later heads"), ("keys", "keys"),
                ("values", "values"), ("mlp", "MLPs"), ("logits", "logits"),
            )
            if code == "sink" or reader == "all"
        ),
        DIFFUSION,
        counted=True,
    ),
    "jumps": Table(
        "circuits-edges",
        (
            Row("jumps per problem", {"measure": "jumps"}, 1.0, 1),
            *(
                percent(f"undone through {name}, %: {label}", 0, measure="undone", letter=letter, sender=sender)
                for letter, name in (("q", "queries"), ("k", "keys"))
                for sender, label in (("all", "all components"), ("head", "heads"), ("mlp", "MLPs"))
            ),
            percent("queries of just decided positions, %", 0, measure="local", where="decided"),
            percent("queries of as many nearest others, %", 0, measure="local", where="nearby"),
            percent("queries of as many earlier tokens, masked again, %", 0, measure="local", where="again"),
            plain("change of the embedding, just decided", measure="change", where="decided"),
            plain("… nearest others", measure="change", where="nearby"),
            plain("… masked again", measure="change", where="again"),
        ),
        DIFFUSION,
        counted=True,
    ),
    "stale": Table("caching-costs", (
        *(
            Row(f"{label}, 10⁻⁶ nats", {"measure": "kl", "change": change, "choice": choice, "layer": "all"}, 1e6, 0)
            for change, choice, label in (
                ("stale", "sink", "only sinks stale"),
                ("stale", "same_mass", "only random keys with as much attention stale"),
                ("stale", "nearest", "only the nearest keys stale"),
                ("stale", "random", "only as many random keys stale"),
                ("stale", "sink_of_kind", "only sinks with another key of their kind stale"),
                ("stale", "same_kind", "only random keys of these kinds stale"),
                ("fresh", "none", "everything decided stale"),
                ("fresh", "sink", "… but the sinks"),
                ("fresh", "same_mass", "… but random keys with as much attention"),
                ("fresh", "nearest", "… but the nearest keys"),
                ("fresh", "random", "… but as many random keys"),
            )
        ),
        *(
            percent(f"proposals that change, {label}, %", 2, measure="proposals", layer="all", change=how, choice=keys)
            for how, keys, label in (
                ("stale", "sink", "only sinks stale"),
                ("fresh", "none", "everything stale"),
                ("fresh", "sink", "all but sinks stale"),
            )
        ),
        *(
            Row(f"drift of stale keys, %: {label}", {"measure": "drift", "choice": choice}, 100.0, 1, "caching-sets")
            for choice, label in (
                ("sink", "sinks"), ("same_mass", "random keys with as much attention"),
                ("same_kind", "random keys of their kinds"),
            )
        ),
    ), CACHED),
    "stale-layers": Table("caching-costs", tuple(
        Row(f"layer {layer}: {label}, 10⁻⁶ nats",
            {"measure": "kl", "change": change, "choice": choice, "layer": str(layer)}, 1e6, 0)
        for layer in (1, 2, 3)
        for change, choice, label in (
            ("stale", "sink", "only sinks stale"),
            ("stale", "same_mass", "only random keys with as much attention stale"),
            ("fresh", "none", "everything decided stale"),
            ("fresh", "sink", "… but the sinks"),
        )
    ), CACHED),
    "stale-motion": Table("caching-motion", tuple(
        percent(f"{name}: {label}", measure="jump_share", policy=policy, source=source)
        for policy, name in (
            ("dual", "DualCache"), ("delayed", "DelayedCache"), ("keep-sinks", "KeepSinks"),
            ("not keep-sinks", "its negation"),
        )
        for source, label in (
            ("policy", "strongest key changes, % of steps"), ("same queries", "… in the exact run, same queries"),
            ("exact", "… in the exact run, all queries"),
        )
        if source != "exact" or policy == "dual"
    ), CACHED),
    "ranges": Table("ranges", tuple(
        Row(f"{kind}, {low} to {high}", {"kind": kind, "low": low, "high": high})
        for kind, ranges in (
            ("more", ((1, 7), (8, 20), (21, 40), (41, 120))), ("fewer", ((1, 7), (8, 20), (21, 40), (41, 120))),
            ("groups", ((2, 9), (10, 12), (13, 20))), ("share", ((2, 9), (10, 12), (13, 20))),
        )
        for low, high in ranges
    ), (*MODELS, "tiny-llada-skills", "tiny-llama-skills", "tiny-sdar", "tiny-llada-moe", "tiny-canvas")),
    "seeds": Table("", (
        contrast("existence-detectors", "heads and steps with a sink, %", 0.0, 100.0, 1, measure="heads", detector=EQ3),
        contrast("existence-detectors", "value norm at sinks ÷ median of the row, above 1", 1.0,
                 measure="value_ratio", detector=EQ3),
        contrast("dynamics-null", "strongest key changes, % of steps, beyond the null", 0.0, 100.0, 1,
                 measure="jump_share", source="measured − null model"),
        contrast("dynamics-null", "the same between steps with a sink", 0.0, 100.0, 1,
                 measure="sink_jump_share", source="measured − null model"),
        contrast("dynamics-null", "heads whose strongest key never changes, %, beyond the null", 0.0, 100.0, 1,
                 measure="static_share", source="measured − null model"),
        *(contrast("token_types-matched", f"{kind}: sinks at the same step and place, ratio above 1", 1.0,
                   measure="ratio", by="kind", set=kind, matched="step, position")
          for kind in ("digit", "mask", "newline", "punctuation")),
        *(contrast("necessity-claims", f"points lost beyond a random key, {where}", 0.0, 100.0, 0,
                   measure="cost", part=part)
          for part, where in (("all", "strongest keys"), ("sink", "those that are sinks"), ("other", "all others"))),
        *(contrast("content-claims", label, 0.0, 100.0, 0, measure=claim) for label, claim in (
            ("points that digits cost more if they are sinks",
             "a digit that is a sink costs more than one that is not"),
            ("points that other tokens cost more if they are sinks",
             "another token that is a sink costs more than one that is not"),
        )),
        contrast("events-order", "score against deciding step, same step and place", measure="within"),
        *(contrast("events-landings", f"landings on just decided ÷ {label}, same step and place, above 1", 1.0, 1.0, 1,
                   measure="ratio", others=others, matched="step, position")
          for others, label in (("all", "all others"), ("decided earlier", "tokens decided earlier"))),
        contrast("events-landings", "landings on just decided ÷ the same token written over, same step and place, "
                 "above 1", 1.0, measure="ratio", others="written over", matched="step, position"),
        *(contrast("circuits-claims", label, measure="difference", claim=text, tests=tests) for label, text, tests in (
            *((f"score of the {which} sink written by {writer}, beyond its control's",
               f"the {role}: {writer} write more of its score than of its control's", False)
              for which, role in (("strongest", "strongest sink"), ("most mobile head's", "most mobile head's sink"))
              for writer in ("heads", "MLPs")),
            ("share of a jump undone through queries, beyond keys",
             "jumps go through queries more than through keys", True),
            ("… queries of just decided positions, beyond those nearby",
             "queries of just decided positions move sinks more than those nearby", False),
            ("… beyond those of earlier tokens masked again",
             "queries of just decided positions move sinks more than those of earlier tokens masked again", True),
        )),
        contrast("masked_sinks-matched", "lens at undecided sinks of layer 1, same step and place, points", 0.0, 100.0,
                 0, measure="named_difference", layer=1),
        *(contrast("caching-claims", label, 0.0, 1e6, 0, measure="difference", claim=claim) for label, claim in (
            ("stale sinks, beyond random keys with as much attention, 10⁻⁶ nats",
             "stale sinks change predictions more than random keys with as much attention"),
            ("stale sinks, beyond random keys of the same kinds, 10⁻⁶ nats",
             "stale sinks change predictions more than random keys of the same kinds of token"),
        )),
        contrast("caching-claims", "strongest key moves less under DualCache, points", 0.0, 100.0, 1,
                 measure="difference", claim="strongest keys move less under DualCache"),
        contrast("definitions-excess", "points lost, column sums, steady, 5 per head, beyond random keys", 0.0, 100.0,
                 0, measure="cost", definition="columns_steady", reach="all", top_k=5),
        contrast("interaction-interactions", "points lost with earlier keys only, beyond with all keys", 0.0, 100.0, 0,
                 measure="cost", window="earlier", pick="excess"),
    ), DIFFUSION),
}  # fmt: skip
