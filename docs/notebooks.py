"""Show the executed notebooks of tutorials/ as pages of the site.

Each notebook becomes a Markdown page, `tutorials/NAME.md`, which exists only while the site is built. Text stands as it
is, code and printed output are fenced, and pictures are files beside the page. An interactive page in a notebook is not
copied: a frame of half a million characters would be loaded and searched with the page, which names the function that
makes it. Links of the sources lead to notebooks and to docs/, as GitHub and Jupyter need them; on the site they lead to
pages.

Limitation: Markdown in a notebook follows the rules of Jupyter, in a page those of Python-Markdown, which wants an
empty line before a list.
"""

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
FROM_DOCS = re.compile(r"\]\(\.\./((?:\.\./)*tutorials/\w+)\.ipynb\)")
FROM_TUTORIAL = re.compile(r"\]\((\w+)\.ipynb\)")
VIEW, VIEWS = re.compile(r"sinklens\.views\.\w+"), "../api/views.md"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook, its pictures, and the notebook."""
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        text, pictures = page_of(nbformat.read(path, as_version=4), path.stem)
        files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
        for name, content in {f"{path.stem}.md": text, **pictures}.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Let links to notebooks lead to their pages."""
    return FROM_DOCS.sub(r"](\1.md)", markdown)


def page_of(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(FROM_TUTORIAL.sub(r"](\1.md)", cell.source.replace("](../docs/", "](../")))
        else:
            parts.append(fenced(cell.source, ".python"))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![What the code above draws]({file})")
            elif "text/html" in data:
                view = VIEW.findall(cell.source)[-1]
                parts.append(f"*In [the notebook]({name}.ipynb), [`{view}`]({VIEWS}) shows an interactive page here.*")
            else:
                parts.append(fenced(output.get("text") or data["text/plain"], ".text .output"))
    parts.insert(1, f'[Download this tutorial as a notebook]({name}.ipynb){{ download="{name}.ipynb" }}')
    return "\n\n".join(parts), pictures


def fenced(text: str, kind: str) -> str:
    """A block of code of these classes."""
    return f"````{{ {kind} }}\n{text.rstrip()}\n````"
