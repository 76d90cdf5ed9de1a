"""The tree of a model in a few lines: hook points beside the modules of transformers; equal layers are shown once.

Columns: TransformerLens's name, transformers' name, the points there. A point that shows the output of a module of its
own has that module in brackets.

Pitfall: points that are switched off, and aliases of those shown, are left out; see hooks/names.py.
"""

import re
import textwrap
from itertools import groupby

from sinklens.hooks.tree import HookTree

NAME = re.compile(r"(encoder\.)?(?:blocks\.(\d+)\.)?(?:(.+)\.)?(\w+)")
MODULES = {"hook_q": "q", "hook_k": "k", "hook_v": "v", "hook_embed": "embed", "hook_pos_embed": "positions",
           "hook_time": "time"}  # fmt: skip
"""The module of a point in an `Architecture`."""
LINE = "{:18} {:40} {}"


def outline(tree: HookTree) -> str:
    """The tree as text, one line for each part of the network."""
    parts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in tree.point_names():
        encoder, layer, group, point = (found or "" for found in NAME.fullmatch(name).groups())  # type: ignore[union-attr]
        parts.setdefault((encoder, layer), {}).setdefault(group, []).append(point)
    known, lines, last = tree.architecture, list[str](), list[str]()
    for (encoder, repeated, groups), same in groupby(parts.items(), lambda one: (one[0][0], bool(one[0][1]), one[1])):
        numbers = [layer for (_, layer), _ in same]
        which = "-".join(dict.fromkeys([numbers[0], numbers[-1]]))
        base = known.encoder if encoder else known.base
        for group, points in sorted(groups.items(), key=lambda one: one[0] != ""):
            module = known.norm if group == "ln_final" else getattr(known, group, "")
            if repeated and not group:
                row = f"{encoder}blocks.{which}", f"{base}.{known.layers}.{which}"
            elif repeated:
                row = f"  {group}", f"  {module}"
            else:
                path = "the sampler" if group == "denoise" else f"{base}.{module}".rstrip(".")
                row = f"{encoder}{group}" or "(root)", path
            own = [
                f"{point} ({own_module})" if (own_module := getattr(known, MODULES.get(point, ""), "")) else point
                for point in points
            ]
            first, *more = textwrap.wrap(", ".join(own), 60, break_on_hyphens=False)
            (lines if repeated or not group else last).extend(
                [LINE.format(*row, first), *(LINE.format("", "", text) for text in more)]
            )
    return "\n".join(line.rstrip() for line in [*lines, *last])
