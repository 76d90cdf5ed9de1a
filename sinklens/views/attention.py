"""CircuitsVis's attention heads, in a notebook and in a file that opens offline.

CircuitsVis draws with a script shipped in its Python package. A view here is one self-contained document that holds
this script (compressed) and the numbers, so it needs neither a network nor the surrounding page; a notebook shows it in
a separate frame. CircuitsVis's built-in display would contact an outside server at every draw and fall back on a
content-delivery network.

Limitation: CircuitsVis creates an object for every cell of every head, about 40 µs each, and again whenever the pointer
enters a head. Above `CELLS` cells, neighboring positions are merged into blocks that show their largest value; the
view says so.
"""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Shaped

from sinklens.errors import SinklensError, TrackError, require
from sinklens.runs.intervention import whole_numbers
from sinklens.utils.arguments import checked
from sinklens.utils.atomic import write_file
from sinklens.views.html import HEADS, circuitsvis_chunk, json_block, token_texts
from sinklens.views.patterns import generation_of, pattern_at, pattern_map, recorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinklens.runs import Trace
    from sinklens.runs.result import Generation

CELLS = 24_000  # what CircuitsVis draws in about a second


@checked
def attention(
    run: "Generation | Trace", *, step: int, layer: int, row: int = 0, heads: Sequence[int] | None = None
) -> "AttentionView":
    """CircuitsVis's view of the attention heads of one step and layer.

    A notebook displays the result; ``.save("heads.html")`` writes it to a file. The upper triangle is hidden only for
    causal models. If heads × positions² exceeds `CELLS`, blocks of neighboring positions show their largest value;
    fewer `heads` give smaller blocks.

    Args:
        run: a finished run, or a trace after its block.
        step, layer, row: indices; negative numbers count from the end.
        heads: indices of the heads to show; None for all.

    Raises:
        TrackError: no such step, layer, row or head, or the pattern is unavailable (see `pattern_at`).
        SettingError: `heads` is not a list of integers.
    """
    run = generation_of(run)
    pattern = pattern_at(run, step, layer, row).numpy()
    track = recorded(run).isel(batch=row)
    asked = list(range(len(pattern))) if heads is None else whole_numbers("head", heads)
    for head in asked:
        track.require(head=head)
    chosen = [head % len(pattern) for head in asked]
    require(chosen, "heads is empty; name at least one head, or give None for all.", TrackError)
    sizes = track.data.sizes
    step, layer = step % sizes["step"], layer % sizes["layer"]
    ids = run.canvas[row, step][run.real[row] & (run.canvas[row, step] >= 0)].tolist()
    words = token_texts(track)
    first = int(run.real[row].int().argmax())
    title = f"{track.data.attrs.get('model', '')}, step {step}, layer {layer}"
    return AttentionView(pattern[chosen], [words(token) for token in ids], chosen, track.causal, title, first)


class AttentionView:
    """A drawing of attention heads; see `attention`.

    Attributes:
        pattern, tokens, heads, title: what it shows.
        document: the complete HTML document.
        height: height of the notebook frame, in pixels.
    """

    def __init__(
        self,
        pattern: Float[np.ndarray, "head query key"],
        tokens: Sequence[str],
        heads: Sequence[int],
        causal: bool,
        title: str,
        first: int = 0,
        height: int = 900,
    ) -> None:
        """Draw `pattern` (of `heads`) over `tokens`, whose positions count from `first`."""
        self.pattern, self.tokens, self.heads, self.title = pattern, tokens, heads, title
        block = block_size(*pattern.shape[:2])
        values = pooled(np.nan_to_num(pattern), block)  # queries that a cache policy left out are blank
        grouped = f"each cell the largest of {block} × {block} positions; " if block > 1 else ""
        self.height = height
        props = {
            "attention": np.round(values.astype(float), 4).tolist(),
            "tokens": block_names(tokens, block, first),
            "attentionHeadNames": [f"Head {head}" for head in heads],
            "maskUpperTri": causal,
            "maxValue": float(np.round(values.max(), 4)) or 1.0,
        }
        note = f"{title}: rows attend to columns; {grouped}full color is {props['maxValue']:.2g}."
        self.document = HEADS.document(data=circuitsvis_chunk() + json_block("props", {"props": props, "note": note}))

    def picture(self, ax: "Axes | None" = None, *, caption: bool = True) -> "Axes":
        """Draw the pattern of a view of one head, as `pattern_map` does.

        Args:
            caption: whether the figure has its title: model, step, layer and head.

        Raises:
            TrackError: the view has several heads.
        """
        require(len(self.heads) == 1, f"the view has {len(self.heads)} heads; name one, as in heads=[0].", TrackError)
        title = f"{self.title}, head {self.heads[0]}" if caption else ""
        return pattern_map(self.pattern[0], self.tokens, ax, title=title)

    def save(self, path: str | Path) -> Path:
        """Write one self-contained HTML file.

        Raises:
            SinklensError: the file cannot be written, or its name is that of a picture.
        """
        says = f"{path}: this view is HTML; name it .html. For a picture, save the figure of .picture()."
        require(Path(path).suffix.lower() in ("", ".html", ".htm"), says, SinklensError)
        write_file(path, self.document)
        return Path(path)

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" title="Attention heads" width="100%" height="{self.height}" '
            f'style="border:0" srcdoc="{html.escape(self.document, quote=True)}"></iframe>'
        )


def block_size(heads: int, positions: int) -> int:
    """Number of positions to merge into a block so that CircuitsVis gets at most `CELLS` cells."""
    return -(-positions // max(1, int((CELLS / heads) ** 0.5)))


def pooled(
    pattern: Shaped[np.ndarray, "head query key"], block: int
) -> Shaped[np.ndarray, "head query_block key_block"]:
    """The largest value of each `block` × `block` square; the last squares of a row or column may be smaller."""
    if block == 1:
        return pattern
    edges = [np.arange(0, size, block) for size in pattern.shape[1:]]
    return np.maximum.reduceat(np.maximum.reduceat(pattern, edges[0], axis=1), edges[1], axis=2)


def block_names(tokens: Sequence[str], block: int, first: int = 0) -> list[str]:
    """A name for each block of positions: the token of a single position, or the range of several."""
    if block == 1:
        return list(tokens)
    last = len(tokens) - 1
    return [f"{first + at}–{first + min(at + block - 1, last)}" for at in range(0, len(tokens), block)]
