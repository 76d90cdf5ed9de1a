"""The documentation is short, builds without warnings, opens offline and on a phone, runs, and agrees with the code."""

import ast
import importlib
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from contracts import FILES, ROOT
from test_layers import FLOORS, exported

import sinklens
from sinklens import errors
from sinklens.errors import SinklensError
from sinklens.families import FAMILIES, SAMPLERS
from sinklens.hooks import names
from sinklens.interventions import Intervention
from sinklens.model.files import shipped_names
from sinklens.sinks import Detector

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
BLOCKS = [
    pytest.param(block, id=f"{page}:{number}")
    for page, text in {**PAGES, "README.md": (ROOT / "README.md").read_text()}.items()
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
]
PUBLIC = (
    "sinklens", "sinklens.analyses", "sinklens.evaluation", "sinklens.experiments", "sinklens.families",
    "sinklens.features", "sinklens.hooks", "sinklens.interventions", "sinklens.live",
    "sinklens.sampling", "sinklens.sinks", "sinklens.tasks", "sinklens.views",
)  # fmt: skip
ON_A_PHONE = """
const found = [], range = document.createRange();
if (document.documentElement.scrollWidth > screen.width) found.push('wider than the screen');
for (const code of document.querySelectorAll('.md-typeset code:not(pre > code)')) {
  const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[A-Za-z0-9]+/g)) {
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) found.push(word[0]);
  }
}
return found;
"""
"""Words of code that are divided where reference.py allows no break, and whether the page is wider than the screen."""
# The theme puts tables into boxes that scroll, after a page has loaded.
TABLES_SCROLL = "return [...document.querySelectorAll('article table')].every(t => t.closest('.md-typeset__table'))"
QUOTED = re.findall(r"^```text\n(.*?)\n```", PAGES["errors.md"], flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; an error or a warning fails every test that uses it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    messages = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO")]
    assert (done.returncode, messages) == (0, [])
    return folder


def rows(page: str, under: str) -> list[list[str]]:
    """Cells of the first table below the heading `under`, without its two header lines."""
    text = f"\n{PAGES[page]}".split(f"\n{under}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert table, f"{page} has no table below {under}"
    lines = table.group().splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(cell: str) -> str:
    """The text between the first pair of backticks."""
    return cell.split("`")[1]


# The site


def test_the_documentation_has_at_most_80_000_words():
    assert sum(len(text.split()) for text in PAGES.values()) <= 80_000


@pytest.mark.browser
def test_a_page_on_a_phone_is_no_wider_than_the_screen_and_divides_no_word_of_code(site, browser):
    browser.size(390)
    for page in sorted(site.rglob("*.html")):
        browser.driver.get(page.as_uri())
        browser.wait(TABLES_SCROLL)
        assert browser.js(ON_A_PHONE) == [], page.relative_to(site)


def test_no_page_loads_anything_from_the_network(site):
    loads = re.compile(r"<link\b[^>]*\bhref=[\"']?([^\"'\s>]+)|\b(?:src|srcset|data|poster)=[\"']?([^\"'\s>]+)")
    loaded = [(page.name, "".join(found)) for page in site.rglob("*.html") for found in loads.findall(page.read_text())]
    assert len(loaded) > 100
    assert [entry for entry in loaded if re.match(r"(?:\w+:)?//", entry[1])] == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet.name


def test_the_navigation_lists_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- (?:.*?: )?([\w/.-]+\.md)$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted([*PAGES, *(f"tutorials/{path.stem}.md" for path in ROOT.glob("tutorials/*.py"))])
    assert yaml.safe_load(text)["theme"]["font"] is False


def test_every_exported_name_is_on_a_page_in_a_tutorial_or_in_an_example():
    """Names in the reference alone do not count: it lists whatever is exported."""
    pages = [text for page, text in PAGES.items() if not page.startswith("api/")]
    files = [ROOT / "README.md", *(ROOT / "tutorials").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    used = set(re.findall(r"\w+", " ".join([*pages, *(file.read_text() for file in files)])))
    public = {package: exported(package) for package in PUBLIC}
    assert {package: sorted(names - used) for package, names in public.items() if names - used} == {}
    assert sum(map(len, public.values())) <= 260


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_every_public_name(site, package):
    file = {"sinklens": "index"}.get(package, package.rpartition(".")[2])
    pages = [(site / "api" / f"{name}.html").read_text() for name in (file, "sinks", "errors")]
    ids = set(re.findall(r"id=\"(sinklens[\w.]+)\"", " ".join(pages)))
    ids |= {name.rpartition(".")[0] for name in ids if re.search(r"\.(\w+)\.\1$", name)}  # report.report, for one
    wanted = {f"{package}.{name}" for name in exported(package)}
    homes = {
        "sinklens.SinkTrack": "sinklens.sinks.SinkTrack",
        "sinklens.SinklensError": "sinklens.errors.SinklensError",
    }
    assert {homes.get(name, name) for name in wanted} - ids == set()


# Code blocks


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "block.py"
    file.write_text(block)
    runpy.run_path(str(file))


# Agreement with the code


def _points(layers: int) -> Iterator[tuple[str, str]]:
    """Names and axes of the documented points, with layer numbers filled in."""
    listed = [(code(point), axes) for point, axes, *_ in rows("concepts/hook-points.md", "## All of them")]
    inside = [entry for entry in listed if "{l}" in entry[0]]
    start = listed.index(inside[0])
    yield from listed[:start]
    for layer in range(layers):
        yield from ((name.replace("{l}", str(layer)), axes) for name, axes in inside)
    yield from listed[start + len(inside) :]


def test_the_table_of_hook_points_matches_the_models(tiny_llada, tiny_llama):
    for model in (tiny_llada, tiny_llama):
        assert [name for name, _ in _points(model.cfg.n_layers)] == model.hook_names()


@pytest.mark.parametrize(("heading", "points"), [
    ("## All of them", names.table()),
    ("### Experts, and normalized queries and keys",
     [point for point in names.table(names.EVERY) if point[0] not in dict(names.table())]),
])  # fmt: skip
def test_a_table_of_hook_points_matches_the_code(heading, points):
    documented = [(code(point), axes, what) for point, axes, what, _ in rows("concepts/hook-points.md", heading)]
    assert documented == [(name, spec.axes, spec.meaning) for name, spec in points]


def test_shapes_in_the_table_match_a_run(tiny_llada):
    seen: dict[str, torch.Size] = {}
    keep = (lambda name: True, lambda value, hook: seen.update({hook.name: value.shape}))
    run = sinklens.generate(tiny_llada, "Question: 1", gen_length=2, steps=1, hooks=[keep])
    cfg, length = tiny_llada.cfg, run.canvas.shape[2]
    sizes = {
        "batch": 1, "pos": length, "query": length, "key": length, "query|1": 1, "1": 1, "head": cfg.n_heads,
        "kv_head": cfg.n_key_value_heads, "d_model": cfg.d_model, "d_head": cfg.d_head, "d_mlp": cfg.d_mlp,
        "vocab": cfg.d_vocab,
    }  # fmt: skip
    assert seen == {name: torch.Size(sizes[axis] for axis in axes.split()) for name, axes in _points(cfg.n_layers)}


def test_every_error_class_has_a_heading():
    kinds = [
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SinklensError)
    ]
    assert re.findall(r"^## (\w+)$", PAGES["errors.md"], flags=re.MULTILINE) == kinds
    for kind in kinds[1:]:
        assert f"## {kind}\n\nAlso a `{getattr(errors, kind).__mro__[2].__name__}`" in PAGES["errors.md"]


def _messages() -> list[str]:
    """Every string in the sources, with null characters for filled-in values."""
    found = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_occur_in_the_code():
    messages = _messages()
    assert len(QUOTED) > 10
    patterns = {text: re.compile(".*".join(map(re.escape, text.split("…"))), re.DOTALL) for text in QUOTED}
    assert [text for text, pattern in patterns.items() if not any(map(pattern.search, messages))] == []


def test_names_in_docstrings_exist():
    packages = "|".join(name.removeprefix("sinklens.") for name in PUBLIC[1:])
    for name in re.findall(rf"(?<!`)`(?:sinklens\.)?((?:{packages})\.\w[\w.]*)`", "\n".join(_messages())):
        pkgutil.resolve_name(f"sinklens.{name}")


def test_the_page_of_models_has_every_family_sampler_and_shipped_model_and_no_other_family(site):
    page = (site / "models.html").read_text().replace("<wbr>", "")
    named = set(re.findall(r"<code>([\w.-]+)</code>(?:</a>|</td>)", page))
    assert named >= {*FAMILIES, *SAMPLERS, *shipped_names()}
    assert set(re.findall(r'family="([\w-]+)"', page)) <= {*FAMILIES}
    assert [family.name for family in FAMILIES.values() if not family.checkpoints] == []


@pytest.mark.parametrize(("package", "base", "page"), [
    ("sinklens.sinks", Detector, "concepts/sinks.md"),
    ("sinklens.interventions", Intervention, "concepts/interventions.md"),
])  # fmt: skip
def test_the_concept_page_lists_every_subclass(package, base, page):
    module = importlib.import_module(package)
    kinds = [getattr(module, name) for name in module.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, base) and kind is not base]
    assert [kind.__name__ for kind in kinds if f"][{package}.{kind.__name__}]" not in PAGES[page]] == []


def test_the_documented_floors_are_those_of_the_layer_test():
    assert [set(re.findall(r"`(\w+)`", cells[0])) for cells in rows("design.md", "## The floors")] == [
        set(floor) for floor in reversed(FLOORS)
    ]


def test_every_tutorial_is_listed_and_is_a_page_with_a_picture_in_the_search(site):
    listed = [code(name) for name, _ in rows("tutorials.md", "# Tutorials")]
    assert listed == sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))
    found = (site / "search" / "search_index.json").read_text()
    for name in listed:
        menu, _, page = (site / "tutorials" / f"{name}.html").read_text().partition("<article")
        pictures = re.findall(r'<img [^>]*src="([\w-]+\.png)"', page)
        assert {(site / "tutorials" / file).is_file() for file in pictures} == {True}
        assert f'"tutorials/{name}.html' in found
        assert ".ipynb" not in menu
