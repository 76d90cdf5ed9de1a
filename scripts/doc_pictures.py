"""Draw the pictures of the concept pages, from runs of the shipped models.

    python scripts/doc_pictures.py

Writes five files to docs/pictures. masks.svg shows which keys a query sees in each kind of model, and canvas.svg a
canvas over the steps of a run. replay.svg shows a free-running change beside the same change under replay, and
policies.svg which keys a step computes, reuses or hides under cache policies. Each of these has its own background,
light or dark as the reader's system asks. sinks.png is the picture that `make demo` writes.
"""

import warnings
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int

import sinklens
from sinklens.cli.models import PROBLEM
from sinklens.cli.writing import write_figure
from sinklens.errors import PromptWarning
from sinklens.experiments import effect
from sinklens.interventions import AblateHeads
from sinklens.tasks.word_problems import held_out
from sinklens.views import sink_paths

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
STYLE = """
  .ground { fill: #ffffff } text { fill: #24292f; font: 12px sans-serif } .small { font-size: 10.5px }
  .blue { fill: #0072b2 } .pale { fill: #b9d6ea } .orange { fill: #e69f00 } .none { fill: #e6e8eb }
  .line { stroke-width: 2 } .blue.line { stroke: #0072b2; fill: none } .orange.line { stroke: #d08700; fill: none }
  .axis { stroke: #8b949e; fill: none } .on { fill: #10131a } .long { font-size: 8.5px }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1e2129 } text { fill: #dfe3ea } .none { fill: #343946 } .pale { fill: #2b4a63 }
    .blue { fill: #4ca3dd } .blue.line { stroke: #4ca3dd } .orange.line { stroke: #e69f00 }
  }
"""
Cells = Bool[np.ndarray, "row column"]


class Picture:
    """An SVG file that grows by what is drawn.

    Attributes:
        width, height: size in pixels.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self._title = width, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words whose baseline begins, ends or is centered at a point."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def cells(self, x: float, y: float, where: Cells, size: tuple[float, float], kind: str) -> None:
        """The cells of a map that are True, as one path; neighbors in a row are joined."""
        wide, high = size
        path = []
        for row, marks in enumerate(where):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], marks.astype(int), [0]])))
            for first, last in edges.reshape(-1, 2):
                path.append(f"M{x + first * wide:g} {y + row * high:g}h{(last - first) * wide:g}v{high - 0.6:g}")
                path.append(f"h{-(last - first) * wide:g}z")
        self._parts.append(f'<path class="{kind}" d="{"".join(path)}"/>')

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        self._parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')

    def key(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """What the colors mean: a square and a word for each, from left to right."""
        for kind, words in entries:
            self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y - 9:g}" width="10" height="10"/>')
            self.text(x + 15, y, words, "small")
            x += 30 + 6 * len(words)

    def save(self, name: str) -> None:
        """Write the file."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self._title)}</title>'
        ground = '<rect class="ground" width="100%" height="100%" rx="6"/>'
        FOLDER.mkdir(exist_ok=True)
        lines = [start, f"<style>{STYLE}</style>", ground, *self._parts, "</svg>"]
        (FOLDER / f"{name}.svg").write_text("\n".join(lines) + "\n")


def seen(model: sinklens.Model, ids: Int[torch.Tensor, "batch pos"]) -> Cells:
    """[query, key]: whether some head of some layer gives the key any attention, in one pass."""
    _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    maps = {name: value[0].amax(0).numpy() > 0 for name, value in cache.items()}
    found = np.zeros((ids.shape[1], ids.shape[1]), dtype=bool)
    for name, places in maps.items():
        first = 0 if name.startswith("encoder.") else ids.shape[1] - places.shape[0]
        found[first : first + places.shape[0], : places.shape[1]] |= places
    return found


def draw_masks() -> None:
    """Which keys each query sees, on a short text and 24 further positions."""
    kinds = (
        ("tiny-llada", "masked, shifted, experts"), ("tiny-sdar", "block-causal (blocks of 8)"),
        ("tiny-canvas", "canvas"), ("tiny-llama", "autoregressive"),
    )  # fmt: skip
    picture = Picture(760, 245, "Which keys each query sees, in four kinds of model")
    for number, (name, kind) in enumerate(kinds):
        model, x = sinklens.load(name), 20 + number * 186
        ids = sinklens.generate(model, PROMPT, record_sinks=False).tokens[:, :32]
        places, size = seen(model, ids), (160 / ids.shape[1],) * 2
        picture.text(x, 22, kind)
        picture.text(x, 38, name, "small")
        picture.cells(x, 48, np.ones_like(places), size, "none")
        picture.cells(x, 48, places, size, "blue")
    picture.text(20, 226, "rows: queries, columns: keys, both from the first to the last position", "small")
    picture.key(460, 226, [("blue", "attention allowed"), ("none", "no attention")])
    picture.save("masks")


def draw_canvas() -> None:
    """The answer's positions at every third step, with the tokens that hold."""
    model = sinklens.load("tiny-llada")
    run = sinklens.generate(model, PROMPT, record_sinks=False)
    shown, start = range(0, run.steps_run + 1, 3), run.prompt_length
    decided, size = run.unmask_step[0, start:].numpy(), (28.0, 20.0)
    rows = np.array(shown)[:, None]
    masked, new = decided >= rows, (decided < rows) & (decided >= rows - 3)
    picture = Picture(90 + int(28 * len(decided)), 265, "The answer's positions at every third step of a run")
    for kind, cells in (("none", masked), ("orange", new), ("pale", ~masked & ~new)):
        picture.cells(70, 34, cells, size, kind)
    for row, step in enumerate(shown):
        words = f"step {step}" if step < run.steps_run else "result"
        picture.text(62, 48 + 20 * row, words, "small", "end")
        for place, text in enumerate(model.to_str_tokens(run.canvas[0, step, start:])):
            if not masked[row, place]:
                word = "end" if text.startswith("<") else text.strip() or "⏎"
                shape = ("long" if len(word) > 3 else "small") + " on" * bool(new[row, place])
                picture.text(84 + 28 * place, 48 + 20 * row, word, shape, "middle")
    picture.text(70, 22, "positions of the answer; rows: every third step")
    picture.key(70, 245, [("none", "mask"), ("orange", "decided in the last 3 steps"), ("pale", "decided earlier")])
    picture.save("canvas")


def draw_replay() -> None:
    """A head ablated from step 8 on: canvases of the free run and of the replay, and the change of each prediction."""
    found = effect("tiny-llada", PROMPT, AblateHeads(layers=[1], heads=[5], steps=range(8, 24)))
    start, size = found.base.prompt_length, (9.0, 8.0)
    picture = Picture(760, 290, "A change in a free run and under replay")
    curves = {"free": found.free_running.kl.values[0], "replayed": found.under_replay.kl.values[0]}
    for number, (name, run) in enumerate((("free", found.free), ("replayed", found.replayed))):
        x = 70 + 240 * number
        base, other = (one.canvas[0, :, start:].numpy() for one in (found.base, run))
        masked, differ = run.undecided[0, :, start:].numpy(), base != other
        masked = np.concatenate([masked, np.zeros((len(base) - len(masked), masked.shape[1]), dtype=bool)])
        picture.text(x, 22, "free: its own canvases" if name == "free" else "replay: the base run's canvases")
        for kind, cells in (("none", masked & ~differ), ("pale", ~masked & ~differ), ("orange", differ)):
            picture.cells(x, 34, cells, size, kind)
        points = [(566 + 7.3 * step, 234 - 190 * min(value, 2.5) / 2.5) for step, value in enumerate(curves[name])]
        picture.line(points, ("orange" if name == "free" else "blue") + " line")
    for step in (0, 8, 16, 24):
        picture.text(62, 42 + 8 * step, f"step {step}" if step < 24 else "result", "small", "end")
    picture.line([(566, 34), (566, 234), (740, 234)], "axis")
    picture.text(552, 22, "change of predictions (KL)")
    for value in (0, 1, 2):
        picture.text(560, 238 - 190 * value / 2.5, f"{value}", "small", "end")
    picture.text(728, 50, f"↑ {curves['free'][-1]:.1f}", "small", "end")
    for step in (0, 8, 16, 23):
        picture.text(566 + 7.3 * step, 250, f"{step}", "small", "middle")
    picture.key(70, 275, [("none", "mask"), ("pale", "as in the base run"), ("orange", "differs from the base run")])
    picture.key(566, 275, [("orange", "free"), ("blue", "replay")])
    picture.save("replay")


def draw_policies() -> None:
    """Fresh, stale and hidden keys of layer 1, by step and position, in runs with three blocks of 8."""
    policies = ("prefix", "dual", "delayed", "keep-sinks:4", "refresh:4")
    names = ("PrefixCache()", "DualCache()", "DelayedCache()", "KeepSinks(k=4)", "Refresh(every=4)")
    picture = Picture(760, 330, "Fresh, stale and hidden keys by step and position, under five cache policies")
    for number, (policy, name) in enumerate(zip(policies, names, strict=True)):
        run = sinklens.generate("tiny-llada", PROMPT, cache=policy, block_length=8)
        fresh, age = (run.sinks[key][0].isel(layer=1).to_numpy() for key in ("fresh", "staleness"))
        x, y = 20 + 248 * (number % 3), 34 + 145 * (number // 3)
        size = (220 / fresh.shape[1], 110 / len(fresh))
        picture.text(x, y - 8, name)
        for kind, cells in (("blue", fresh), ("orange", ~fresh & (age >= 0)), ("none", ~fresh & (age < 0))):
            picture.cells(x, y, cells, size, kind)
    picture.text(20, 315, "rows: steps from top to bottom; columns: prompt, then answer", "small")
    picture.key(400, 315, [("blue", "fresh"), ("orange", "stale"), ("none", "gone")])
    picture.save("policies")


def draw_sinks() -> None:
    """The strongest keys of both twins at every step."""
    runs = [sinklens.generate(name, held_out()[PROBLEM].prompt) for name in ("tiny-llada", "tiny-llama")]
    write_figure(FOLDER / "sinks.png", sink_paths([run.sinks for run in runs]))


def main() -> None:
    """Draw all five."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PromptWarning)  # a finished text has no masks, and its pattern is what is drawn
    for draw in (draw_masks, draw_canvas, draw_replay, draw_policies, draw_sinks):
        draw()


if __name__ == "__main__":
    main()
