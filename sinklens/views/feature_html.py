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
from sinklens.sinks.palette import RAMPS
from sinklens.utils.arguments import as_tuple, checked
from sinklens.utils.atomic import write_file
from sinklens.views.html import asset, hashes, token_text

LEVELS = 8
AROUND = 24  # tokens shown on each side of an example


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

    style = _style()
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(asset("features.html"))
    write_file(out, page.render(
        title=title, summaries=as_tuple(summaries), style=style, bars=_bars, tokens=partial(_tokens, model),
        policy=f"default-src 'none'; style-src {hashes([style])}; base-uri 'none'; form-action 'none'",
    ))  # fmt: skip


def _style() -> str:
    """The style sheet, with a class for each level of how strongly a feature fires."""
    tint = "--tint: {}; /* text on it can still be read */"
    colors = f":root {{ {tint.format(RAMPS['sequential'][3])} }}\n"
    colors += f"@media (prefers-color-scheme: dark) {{ :root {{ {tint.format(RAMPS['dark'][2])} }} }}\n"
    shades = (
        f".a{level} {{ background: color-mix(in srgb, var(--tint) {100 * level // LEVELS}%, transparent); }}\n"
        for level in range(1, LEVELS + 1)
    )
    return asset("theme.css") + asset("features.css") + colors + "".join(shades)


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
