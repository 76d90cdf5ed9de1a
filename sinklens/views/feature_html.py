"""A page of features: top examples with their step and state, and where each feature fires.

One HTML file that needs no server, no script and no network; the only style sheet is inside it. Text of the model is
escaped.

Pitfall: the examples are the largest values. A feature's typical value is in `mean_value`, shown beside them; a feature
that looks clear at its top may be mixed below.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sinklens.features.reading import FeatureExample, FeatureSummary
from sinklens.model import Model
from sinklens.utils.arguments import as_tuple, checked
from sinklens.utils.atomic import write_file
from sinklens.views.html import asset, hashes, token_text

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


@checked
def feature_page(
    model: "Model", summaries: FeatureSummary | Sequence[FeatureSummary], out: str | Path, title: str = "Features"
) -> None:
    """Write the page of some features.

    Args:
        model: the model, for the text of tokens; ids are shown without a tokenizer.
        summaries: one or several, from `summarize_features`.
        out: the HTML file.
        title: its heading.
    """
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(asset("features.html"))
    write_file(out, page.render(
        title=title, summaries=as_tuple(summaries), style=STYLE, bars=_bars, tokens=partial(_tokens, model),
        policy=f"default-src 'none'; style-src {hashes([STYLE])}; base-uri 'none'; form-action 'none'",
    ))  # fmt: skip


def _tokens(model: "Model", one: FeatureExample) -> Iterator[tuple[str, int, bool]]:
    """The text around a place: each token, how strongly the feature fires at it, and whether it is the place."""
    largest = max(float(np.nanmax(one.values)), 1e-12)
    for index in range(max(0, one.place - AROUND), min(len(one.tokens), one.place + AROUND + 1)):
        value, token = max(0.0, float(np.nan_to_num(one.values[index]))), one.tokens[index]
        word = None if model.tokenizer is None or token < 0 else str(model.tokenizer.decode([token]))
        yield token_text(token, word, {model.mask_token_id}), int(np.ceil(LEVELS * value / largest)), index == one.place


def _bars(shares: np.ndarray) -> list[tuple[float, float]]:
    """Each share, and the height of its bar."""
    return [(share, 40 * share / max(float(np.nanmax(shares)), 1e-12)) for share in np.nan_to_num(shares)]
