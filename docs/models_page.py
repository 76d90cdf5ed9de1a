"""Fill the page of the models from what the families declare.

Comments in docs/models.md such as ``<!-- families -->`` become tables and sections: from the records and docstrings of
`sinklens.families`, from what its registry refuses, and from the cards of the models that ship. So a fact about a
family stands in its module, and one about a shipped model in its card.

Pitfall: the headings are the beginnings of the docstrings, up to the colon; other pages link to them.
"""

import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from markdown.extensions.toc import slugify

from sinklens.families import Family
from sinklens.families.registry import MODULES, REFUSED_FAMILIES, REFUSED_SAMPLERS
from sinklens.model.files import find_checkpoint, shipped_names

COMMENT = re.compile(r"<!-- (.+) -->")
SCORE = re.compile(r"^\| ([^|]+) \| (\d[^|]+ of \d+) \|", flags=re.MULTILINE)
LOSS = re.compile(r"^Loss on .*", flags=re.MULTILINE)
NOTE = re.compile(r"^((?:Pitfall|Limitation|Source):)", flags=re.MULTILINE)
PROBLEMS = ", trained by sinklens on word problems that it generates"
_MODULES = [import_module(f"sinklens.families.{name}") for name in MODULES]


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Put the generated parts of the page of the models in the places of their comments."""
    if page.file.src_uri != "models.md":
        return markdown
    made = {
        "families": families(),
        "compared": compared(),
        "refused": refused(),
        "each family": sections(),
        "shipped": shipped(),
    }
    return COMMENT.sub(lambda comment: made[comment[1]], markdown)


def families() -> str:
    """A row for each family, with a link to its section."""
    head = ("family", "checkpoints", "recognized by", "attention", "samplers")
    return _table(head, (_row(one, module) for module in _MODULES for one in module.FAMILIES))


def _row(one: Family, module: Any) -> tuple[str, ...]:
    link = f"[`{one.name}`](#{slugify(_title(module), '-')})"
    samplers = ", ".join(f"`{name}`" for name in _samplers(one, module))
    return link, one.checkpoints, f"`{one.recognized}`", one.attention, samplers


def _samplers(family: Family, module: Any) -> list[str]:
    """The family's sampler, the others of its module that fit, and those of its modes."""
    fits = [one.name for one in module.SAMPLERS if family.attention in one.attention and one.masked is family.masked]
    return list(dict.fromkeys([family.sampler, *fits, *family.modes.values()]))


def compared() -> str:
    """A row for each family: what equals the reference's, and the sizes that were built."""
    rows = (
        (f"`{one.name}`", one.verified, " and ".join(f"{n:,}" for n in one.parameters))
        for module in _MODULES
        for one in module.FAMILIES
    )
    return _table(("family", "verified", "parameters (built, not run)"), rows)


def refused() -> str:
    """What is known and not supported, and why."""
    kinds = [f"- A `model_type` or class that begins with `{name}` {why}." for name, why in REFUSED_FAMILIES.items()]
    return "\n".join([*kinds, *(f"- The sampler `{name}` {why}" for name, why in REFUSED_SAMPLERS.items())])


def sections() -> str:
    """A section for each module of families, and one for a network that several of them share, before these."""
    names = [(*(one.module for one in module.FAMILIES), module.__name__) for module in _MODULES]
    return "\n\n".join(_section(import_module(name)) for name in dict.fromkeys(sum(names, ())) if name)


def _section(module: Any) -> str:
    summary, _, rest = _text(module).partition("\n\n")
    about = summary.removeprefix(f"{_title(module)}: ")
    named = ", ".join(f"`{one.name}`" for one in getattr(module, "FAMILIES", ()))
    settings = ", ".join(f"[`{one.name}`][{one.__module__}.{one.__name__}]" for one in getattr(module, "SAMPLERS", ()))
    label = "Families" if "," in named else "Family"
    lines = f"\n\n{label}: {named}. Sampler settings: {settings}." * bool(named)
    noted = NOTE.sub(r"**\1**", rest)
    return f"### {_title(module)}\n\n{about[0].upper()}{about[1:]}{lines}\n\n{noted}"


def _title(module: Any) -> str:
    return _text(module).partition(": ")[0]


def _text(module: Any) -> str:
    text = inspect.getdoc(module)
    assert text is not None, "every module has a docstring"
    return text


def shipped() -> str:
    """A row for each model that ships: what its card says of it, and its scores."""
    return _table(("name", "what", "held out"), ((f"`{name}`", *_card(name)) for name in shipped_names()))


def _card(name: str) -> tuple[str, str]:
    """The first paragraph of a card, without the settings; and the scores, or the loss."""
    card = (find_checkpoint(name) / "README.md").read_text()
    about = " ".join(card.split("\n\n")[1].split()).replace(PROBLEMS, "")
    scores = [f"{task} {score}" for task, score in SCORE.findall(card)] or LOSS.findall(card)
    return about.partition(" It differs from")[0], "; ".join(scores)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)
