"""A page of features: top examples with their step and state, and where each feature fires.

One HTML file that needs no server, no script and no network; the only style sheet is inside it. Text of the model is
escaped.

Pitfall: the examples are the largest values. A feature's typical value is in `mean_value`, shown beside them; a feature
that looks clear at its top may be mixed below.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sinklens.features.reading import FeatureExample, FeatureSummary
from sinklens.utils.atomic import atomic_write
from sinklens.views.html import MASKED, visible

if TYPE_CHECKING:
    from sinklens.model import Model

LEVELS = 8
AROUND = 24  # tokens shown on each side of an example
STYLE = "\n".join(
    [
        "body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }",
        "section { border-top: 1px solid #ccc; padding: .5rem 0 1rem; }",
        "p.example { font-family: ui-monospace, monospace; font-size: 13px; margin: .3rem 0; }",
        "p.example b { outline: 2px solid #b30000; }",
        "span.what { color: #555; } table { border-collapse: collapse; } td, th { padding: .1rem .7rem .1rem 0; }",
        "td, th { text-align: left; } svg { display: block; }",
        *(f".a{level} {{ background: rgba(230, 85, 13, {level / LEVELS:.2f}); }}" for level in range(1, LEVELS + 1)),
    ]
)


def feature_page(
    model: "Model", summaries: Sequence[FeatureSummary], path: str | Path, title: str = "Features"
) -> None:
    """Write the page of some features.

    Args:
        model: the model, for the text of tokens; ids are shown without a tokenizer.
        summaries: from `summarize_features`.
        path: the HTML file.
        title: its heading.
    """
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = "\n".join(_section(model, one) for one in summaries)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{sections}\n</body></html>\n"
    )
    with atomic_write(path) as part:
        part.write_text(page, encoding="utf-8")


def _section(model: "Model", one: FeatureSummary) -> str:
    """One feature."""
    head = "".join(f"<th>{name}</th>" for name in one.firing)
    cells = "".join(f"<td>{'–' if np.isnan(share) else f'{share:.1%}'}</td>" for share in one.firing.values())
    mean = "never fires" if np.isnan(one.mean_value) else f"mean value where it fires {one.mean_value:.3g}"
    examples = "\n".join(_example(model, example) for example in one.examples)
    return (
        f'<section id="feature-{one.feature}"><h2>Feature {one.feature}</h2><p>{mean}; fires at</p>'
        f"<table><tr>{head}</tr><tr>{cells}</tr></table>\n<p>share of positions by step</p>{_bars(one.by_step)}\n"
        f"{examples}</section>"
    )


def _example(model: "Model", one: FeatureExample) -> str:
    """One place, with the text around it."""
    largest = max(float(np.nanmax(one.values)), 1e-12)
    parts = []
    for index in range(max(0, one.place - AROUND), min(len(one.tokens), one.place + AROUND + 1)):
        value = float(np.nan_to_num(one.values[index]))
        level = int(np.ceil(LEVELS * value / largest)) if value > 0 else 0
        text = escape(_text(model, one.tokens[index]))
        shown = f'<span class="a{level}">{text}</span>' if level else text
        parts.append(f"<b>{shown}</b>" if index == one.place else shown)
    what = f"{one.value:.3g}, step {one.step}, position {one.place}, {one.state}"
    return f'<p class="example"><span class="what">{what}:</span> {"".join(parts)}</p>'


def _text(model: "Model", token: int) -> str:
    if token < 0:
        return ""
    if token == model.mask_token_id:
        return MASKED
    return f"⟨{token}⟩" if model.tokenizer is None else visible(str(model.tokenizer.decode([token])))


def _bars(shares: np.ndarray) -> str:
    """Bars of the shares by step."""
    largest = max(float(np.nanmax(shares)), 1e-12)
    bars = "".join(
        f'<rect x="{6 * step}" y="{40 - 40 * share / largest:.1f}" width="5" height="{40 * share / largest:.1f}" '
        f'fill="#e6550d"><title>step {step}: {share:.1%}</title></rect>'
        for step, share in enumerate(np.nan_to_num(shares))
    )
    return f'<svg width="{6 * len(shares)}" height="40" role="img" aria-label="share by step">{bars}</svg>'
