"""The tables of docs/findings.md: which stored numbers each one holds. findings.py writes them."""

from dataclasses import dataclass
from typing import Any

from sinklens.analyses.estimates.scales import DIFFERENCE, LINEAR, LOG, SHARE, Scale

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
        listed: whether it is a row of the page; others count in the correction only.
        on: scale of the interval over the seeds.
    """

    threshold: float = 0.0
    listed: bool = True
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
    file: str,
    label: str,
    threshold: float = 0.0,
    scale: float = 1.0,
    digits: int = 2,
    listed: bool = True,
    **where: Any,
) -> Contrast:
    """A row of the table of seeds: ratios have the threshold 1, shares and their differences are in percent."""
    bounded = SHARE if where.get("measure") == "heads" else DIFFERENCE
    on = LOG if threshold == 1 else bounded if scale == 100 or where.get("measure") == "within" else LINEAR
    return Contrast(label, where, scale, digits, file, threshold, listed, on)


DIFFUSION = MODELS[:3]
TEXTS = ("tiny-text", "tiny-text-causal")
PAIR = ("smollm2-135m", "smollm2-135m-causal", "smollm2-135m-masked")
HIDDEN = {"kind": "any", "choice": "sink"}
PAIR_ROWS: tuple[tuple[str, float, int, dict[str, Any]], ...] = (
    ("loss, nats per token", 1.0, 2, {"measure": "nats"}),
    ("attention to the first position, %", 100.0, 1, {"measure": "first_mass"}),
    ("heads whose strongest key is the first position, %", 100.0, 1, {"measure": "first_strongest"}),
    ("heads with a sink, %", 100.0, 1, {"measure": "sink_heads"}),
    ("heads with a sink, per mask, %", 100.0, 1, {"measure": "per_place", "kind": "mask"}),
    ("heads with a sink, per delimiter, %", 100.0, 1, {"measure": "per_place", "kind": "delimiter"}),
    ("sinks that are no-ops, %", 100.0, 1, {"measure": "no_op_share"}),
    ("cosine of queries with keys, at sinks − at other keys", 1.0, 2, {"measure": "alignment"}),
    ("nats lost by hiding all sinks", 1.0, 2, {"measure": "cost", **HIDDEN}),
    ("… attention hidden, %", 100.0, 0, {"measure": "removed", **HIDDEN}),
    ("… by hiding as many random keys", 1.0, 2, {"measure": "cost", "kind": "any", "choice": "random"}),
    ("a token replaced: strongest key of later queries changes, %", 100.0, 1,
     {"measure": "jump_share", "edit": "edited, later", "lead": 0.0}),
    ("a mask filled in: strongest key changes, %", 100.0, 1,
     {"measure": "jump_share", "edit": "revealed", "lead": 0.0}),
)  # fmt: skip
ALONE = ("first_strongest", "alignment")  # measures that only the first table has
SEEN = (
    *(("first", sees) for sees in (
        "everything", "itself", "one other key", "itself, in the first quarter of the layers",
        "itself, in the other layers",
    )),
    ("middle", "everything"),
    ("middle", "itself"),
)  # fmt: skip


def seen(sees: str) -> str:
    """What a restricted position sees; a causal model's sees less than everything anyway."""
    return "is not restricted" if sees == "everything" else f"sees {sees}"


PROBLEM_ROWS: tuple[tuple[str, float, int, dict[str, Any]], ...] = tuple(
    (f"heads with a sink, per {kind}, %", 100.0, 1, {"measure": "per_place", "kind": kind})
    for kind in ("digit", "word")
)
TEXT_KINDS = ("any", "delimiter", "start", "mask", "digit", "word")
LISTED = ("delimiter",)  # the kinds of token whose rows the page has
EQ3 = "epsilon-over-mean (sum, 3)"
WITHIN = "step, position, group"
TABLES: dict[str, Table] = {
    "pair": Table("pair-texts", tuple(
        Row(label, {"share": 0.15, **where}, scale, digits) for label, scale, digits, where in PAIR_ROWS
    ), models=PAIR),
    "alone": Table("alone", tuple(
        percent(f"{place} {seen(sees)}: {what}, %", measure=measure, place=place, sees=sees)
        for place, sees in SEEN
        for measure, what in (("share", "attention"), ("strongest", "heads whose strongest key it is"))
        if measure == "share" or sees == "itself"
    ), models=(PAIR[0], f"{PAIR[0]} in both directions", PAIR[2])),
    "pair_shares": Table("pair-texts", tuple(
        Row(f"{label}, {100 * share:.0f} % masked", {"share": share, **where}, scale, digits)
        for label, scale, digits, where in PAIR_ROWS
        if where["measure"] not in (*ALONE, "removed", "nats", "sink_heads") and where.get("kind") != "mask"
        and where.get("edit") != "edited, later"
        for share in (0.05, 0.9)
        if (where["measure"], share) != ("first_mass", 0.05) and (where.get("choice"), share) != ("random", 0.9)
    ), models=PAIR[2:]),
    "pair_pairs": Table("pair-pairs", (
        percent("heads with a sink, points", measure="heads with a sink, of 1", share=0.15),
        plain("nats lost by hiding all sinks", measure="hiding any sinks", share=0.15),
        percent("strongest key changes, a token replaced, points", measure="jumps, a token replaced, later queries"),
    ), models=(f"{PAIR[2]} − {PAIR[1]}",)),
    "pair_fates": Table("pair-fates", tuple(
        percent(label, measure=fate, token=token, share=0.15)
        for label, fate, token in (
            ("of the base's sinks: at the first position, %", "of_sinks", "first position"),
            ("… at delimiters, %", "of_sinks", "delimiter"),
            ("sinks of the same head in the other model, %", "same_head", "any"),
            ("… of other heads of the layer only, %", "other_head", "any"),
            ("… of the same head if it reads another text, %", "another_text", "any"),
            ("at the first position: of the same head, %", "same_head", "first position"),
            ("at delimiters: of the same head, %", "same_head", "delimiter"),
            ("at other tokens: of the same head, %", "same_head", "other"),
        )
    ), models=tuple(f"{PAIR[0]} → {other}" for other in PAIR[1:])),
    "pair_matched": Table("pair-matched", (
        percent("heads with a sink whose other keys receive as much, %", measure="matched_heads", share=0.15),
        *(plain(label, measure="matched_cost", share=0.15, hidden=hidden) for label, hidden in (
            ("nats lost by hiding their sinks", "sinks"), ("… by hiding those other keys", "others"),
            ("… difference", "difference"),
        )),
        *(plain(f"… difference, {100 * share:.0f} % masked", measure="matched_cost", share=share, hidden="difference")
          for share in (0.05, 0.3, 0.5, 0.7, 0.9)),
    ), models=PAIR),
    "pair_problems": Table("problems/pair-texts", (
        *(
            Row(label, {"share": 0.15, **where}, scale, digits)
            for label, scale, digits, where in (*PAIR_ROWS, *PROBLEM_ROWS)
            if where["measure"] not in (*ALONE, "removed", "nats", "jump_share")
            and where.get("kind") not in ("mask", "delimiter") and where.get("choice") != "random"
        ),
        plain("nats lost by hiding all sinks, 90 % masked", measure="cost", share=0.9, **HIDDEN),
        *(Row("sinks − equal attention, nats" if share == 0.15 else f"… {100 * share:.0f} % masked",
              {"measure": "matched_cost", "share": share, "hidden": "difference"}, file="problems/pair-matched")
          for share in (0.15, 0.05, 0.3, 0.5, 0.7, 0.9)),
    ), models=PAIR),
    "pair_problem_fates": Table("problems/pair-fates", tuple(
        percent(label, measure="same_head", token=token, share=0.15)
        for label, token in (("sinks of the same head in the other model, %", "any"),
                             ("at the first position: of the same head, %", "first position"))
    ), models=tuple(f"{PAIR[0]} → {other}" for other in PAIR[1:])),
    "existence": Table("existence-detectors", (
        percent("heads and steps with a sink, %", measure="heads", detector=EQ3),
        plain("value norm at sinks ÷ median of the row", measure="value_ratio", detector=EQ3),
    ), models=DIFFUSION),
    "edits": Table("groups/edits-jumps", (
        Row("from step to step, all steps", {"measure": "jump_share"}, 100.0, 1, "dynamics-motion"),
        *(percent(label, measure="jump_share", edit=edit, lead=0.0) for label, edit in (
            ("a token decided, as in the run", "decided"),
            ("the same tokens in random order", "shuffled"),
            ("another problem's answer", "another answer"),
            ("a token decided: later queries", "decided, later"),
            ("a token of the prompt replaced: later queries", "prompt token"),
            ("an operand replaced: later queries", "operand"),
        )),
        Row("as in the run − another problem's answer, points",
            {"measure": "jump_share", "compared": "decided − another answer", "lead": 0.0}, 100.0, 1,
            "groups/edits-differences"),
        percent("jumps when a token is decided: share with a lead below 0.1", measure="near_tie_share", edit="decided"),
    )),
    "matched": Table("groups/token_types-matched", (
        *(plain(f"sinks on {kind}s ÷ other tokens, {label}", measure="ratio", by="kind", set=kind, matched=matched)
          for kind in ("mask", "digit")
          for label, matched in (("all places", "nothing"), ("same step and place", "step, position"),
                                 ("within templates", WITHIN))),
        *(Row(f"landings on just-decided ÷ {name}, same step, place and template",
              {"measure": "ratio", "others": others, "matched": WITHIN}, 1.0, 1, "groups/events-landings")
          for name, others in (("all other answer tokens", "all"), ("those decided earlier", "decided earlier"),)),
        Row("… ÷ the same tokens, if written over earlier ones; all steps and places",
            {"measure": "ratio", "others": "written over", "matched": "nothing"}, 1.0, 1, "groups/events-landings"),
        *(Row(f"score against deciding step, correlation, {label}", {"measure": measure}, 1.0, 2, "groups/events-order")
          for label, measure in (("same step and place", "within"), ("within templates", "within_group"))),
    ), models=(*DIFFUSION, PAIR[2]), comparable=0.2),
    "texts": Table("texts-texts", (
        plain("loss, nats per token", 3, measure="nats"),
        *(row
          for kind in LISTED
          for row in (
              plain(f"nats lost by hiding sinks on {kind}s", 3, measure="cost", kind=kind, choice="sink"),
              plain("… by hiding equal attention elsewhere", 3, measure="cost", kind=kind, choice="same_mass"),
              Row("… difference", {"measure": f"hiding {kind} sinks costs more than hiding as much attention"}, 1.0, 3,
                  "texts-claims"),
              percent("… attention hidden, %", measure="removed", kind=kind, choice="sink"),
              percent("… heads with a sink, per place, %", measure="per_place", kind=kind),
          )),
        plain("log2 of what values write at sinks ÷ at other keys", measure="write_ratio"),
        percent("sinks that are no-ops, %", 2, measure="no_op_share"),
        percent("a token replaced: strongest key of later queries changes, %",
                measure="jump_share", edit="edited, later", lead=0.0),
    ), models=TEXTS),
    "text_shares": Table("shares/texts-claims", tuple(
        plain(f"all sinks: cost beyond equal attention, nats, {100 * share:.0f} % masked", 3, share=share,
              measure="hiding any sinks costs more than hiding as much attention")
        for share in (0.05, 0.5, 0.9)
    ), models=TEXTS[:1]),
    "text_seeds": Table("", (
        *(contrast("texts-claims", f"sinks on {kind}s: cost beyond equal attention, nats", digits=3,
                   listed=kind in LISTED, measure=f"hiding {kind} sinks costs more than hiding as much attention")
          for kind in TEXT_KINDS),
        *(contrast("texts-claims", f"heads with a sink at a {kind}, beyond words, points", 0.0, 100.0, 1,
                   False, measure=f"a {kind} is a sink more often than a word")
          for kind in ("start", "mask", "delimiter")),
        contrast("texts-claims", "log2 of what values write at other keys ÷ at sinks",
                 measure="sinks write less than other keys"),
        contrast("texts-claims", "stale sinks cost more than as much stale attention, 10⁻³ nats", 0.0, 1e3,
                 listed=False, measure="stale sinks cost more than as much stale attention"),
        *(contrast("texts-pairs", f"sinks on {kind}s: cost beyond equal attention, nats, masked − causal", digits=3,
                   listed=kind in LISTED,
                   measure=f"hiding {kind} sinks, beyond as much attention")
          for kind in TEXT_KINDS if kind != "mask"),
        *(contrast("texts-pairs", f"heads with a sink at a {kind}, points, masked − causal", 0.0, 100.0, 1,
                   kind in LISTED, measure=f"heads with a sink at a {kind}")
          for kind in ("start", "delimiter", "word")),
        contrast("texts-pairs", "log2 of what values write at sinks ÷ at other keys, masked − causal",
                 measure="log2 of what sinks write"),
        contrast("texts-pairs", "a token replaced: strongest key of later queries changes, points, masked − causal",
                 0.0, 100.0, 1, measure="jumps, a token replaced, later queries"),
    ), (*TEXTS, " − ".join(TEXTS))),
    "swaps": Table("groups/swaps-swaps", (
        *(plain(f"{swap}: heads with a sink there, {when}", measure=measure, swap=swap)
          for swap in ("digit → word", "word → mask")
          for when, measure in (("before", "sinks_before"), ("after", "sinks_after"))),
        *(Row(swap.replace(",", ": change,", 1), {"measure": "change", "swap": swap}, 1.0, 2, "groups/swaps-beyond")
          for swap in ("digit → word, beyond digit → digit", "word → digit, beyond word → word",
                       "word → mask, beyond word → word")),
    ), models=(*DIFFUSION, "tiny-llama", PAIR[2])),
    "equal_mass": Table("groups/content-costs", (
        *(Row(f"sinks on {name}{label}", {"kind": kind, "part": "sink", "change": change, "measure": measure}, 100.0,
              digits, file)
          for kind, name in (("digit", "digits"), ("not digit", "other tokens"))
          for label, change, measure, digits, file in (
              (": problems lost, %", "mask", "cost", 0, "groups/content-costs"),
              (", control: problems lost, %", "mask_mass", "cost", 0, "groups/content-costs"),
              (": attention removed, %", "mask", "removed", 1, "groups/content-removed"),
              (", control: attention removed, %", "mask_mass", "removed", 1, "groups/content-removed"),
          )),
    ), models=DIFFUSION),
}  # fmt: skip
