"""English text for the text models: documentation, dictionaries and books from Debian, under free licenses.

`gather` fetches the packages of `SOURCES` (``apt-get download``, which needs Debian or a relative but no privileges),
unpacks them side by side, strips markup, drops what is not prose, and removes paragraphs that occur twice. The result
is one file of documents. Sources marked `held_out` are never trained on, so a score on them is not a score on pages of
a known manual. None of the text is part of sinklens.

A *paragraph* is what a block element of HTML, a blank line of POD or an entry of a dictionary delimits. It counts as
prose if it has at least `MIN_WORDS` words and mostly letters. Code (``<pre>``, indented POD) is left out.

Pitfall: the packages of another Debian release hold different text, and a model trained on it has different weights.
The file of documents, not the list of packages, determines the weights; keep it.
"""

import gzip
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

from sinklens.errors import SinklensError
from sinklens.utils.atomic import atomic_write

MIN_WORDS = 6
LETTERS = 0.75  # share of a paragraph's characters that are letters or spaces
_BLOCKS = re.compile("p|li|d[dt]|h[1-6]|t[dhr]|div|br|table|[uod]l|section|title|caption")
_SKIPPED = re.compile("script|style|pre|nav|head|header|footer|table|svg|math|form|button")
ENTRIES = 400  # paragraphs of a dictionary per document


@dataclass(frozen=True)
class DebianPackage:
    """One Debian package.

    Attributes:
        package: its name.
        files: pattern of its text files, below the package's root.
        format: "html", "pod", "dictionary" (dictd's) or "bible" (the compressed text that the program ``bible`` reads).
        held_out: whether its documents are used only for scores.
        readers: further packages needed to read it.
    """

    package: str
    files: str
    format: str = "html"
    held_out: bool = False
    readers: tuple[str, ...] = ()


SOURCES = (
    DebianPackage("anarchism", "usr/share/doc/anarchism/html/*.html"),
    DebianPackage("bible-kjv-text", "usr/lib/bible.data", "bible", readers=("bible-kjv",)),
    DebianPackage("dict-gcide", "usr/share/dictd/gcide.dict.dz", "dictionary"),
    DebianPackage("dict-jargon", "usr/share/dictd/jargon.dict.dz", "dictionary"),
    DebianPackage("erlang-doc", "usr/share/doc/erlang-doc/doc/**/*.html"),
    DebianPackage("gimp-help-en", "usr/share/gimp/2.0/help/en/*.html"),
    DebianPackage("git-doc", "usr/share/doc/git-doc/**/*.html"),
    DebianPackage("installation-guide-amd64", "usr/share/doc/installation-guide-amd64/en/*.html"),
    DebianPackage("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/html/**/*.html"),
    DebianPackage("perl-doc", "usr/share/perl/*/pod/*.pod", "pod"),
    DebianPackage("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html"),
    DebianPackage("python-django-doc", "usr/share/doc/python-django-doc/html/**/*.html"),
    DebianPackage("python3.11-doc", "usr/share/doc/python3.11/html/**/*.html"),
    DebianPackage("apache2-doc", "usr/share/doc/apache2-doc/manual/en/**/*.html", held_out=True),
    DebianPackage("debian-reference-en", "usr/share/debian-reference/*.html", held_out=True),
    DebianPackage("developers-reference", "usr/share/developers-reference/*.html", held_out=True),
    DebianPackage("dict-foldoc", "usr/share/dictd/foldoc.dict.dz", "dictionary", held_out=True),
    DebianPackage("sqlite3-doc", "usr/share/doc/sqlite3/**/*.html", held_out=True),
)


@dataclass(frozen=True)
class Document:
    """One page, book or run of dictionary entries.

    Attributes:
        source: the package.
        name: its place in the package.
        held_out: whether it is used only for scores.
        text: paragraphs, one per line.
    """

    source: str
    name: str
    held_out: bool
    text: str


class _Page(HTMLParser):
    """Collects the paragraphs of an HTML page, without what `_SKIPPED` encloses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if _SKIPPED.fullmatch(tag):
            self.skipped.append(tag)
        if _BLOCKS.fullmatch(tag):
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.skipped:
            while self.skipped.pop() != tag:
                pass
        if _BLOCKS.fullmatch(tag):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data.replace("¶", ""))


def html_paragraphs(content: bytes) -> list[str]:
    """The paragraphs of an HTML page, in order."""
    page = _Page()
    page.feed(content.decode("utf-8", errors="replace"))
    return "".join(page.parts).split("\n\n")


def pod_paragraphs(content: bytes) -> list[str]:
    """The paragraphs of Perl's documentation format, without code and commands."""
    text = re.sub(r"^=(begin|for)\b.*?^=(end\b.*?|cut)$", "", content.decode("utf-8", "replace"), flags=re.S | re.M)
    kept = [part for part in text.split("\n\n") if not re.match(r"[ \t=]", part.lstrip("\n"))]
    escapes = {"E<gt>": ">", "E<lt>": "<", "E<verbar>": "|", "E<sol>": "/"}
    plain = []
    for part in kept:
        part = re.sub(r"\b[BCFILSXZ]<<+ (.*?) >>+", r"\1", part)
        while (found := re.sub(r"\b[BCFILSXZ]<([^<>]*)>", r"\1", part)) != part:
            part = found
        for escape, character in escapes.items():
            part = part.replace(escape, character)
        plain.append(part)
    return plain


def dictionary_paragraphs(content: bytes) -> list[str]:
    """The entries of a dictionary in dictd's format; headwords start at the margin, without pronunciation."""
    text = gzip.decompress(content).decode("utf-8", errors="replace")
    text = re.sub(r"\\[^\\\n]*\\|\{|\}|\[(?:1913 Webster|PJC|[^\]\n]{1,30})\]", "", text)
    return re.split(r"\n\s*\n|\n(?=\S)", text)


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph has `MIN_WORDS` words and mostly letters."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph.split()) >= MIN_WORDS and letters >= LETTERS * len(paragraph)


_FORMATS: dict[str, Callable[[bytes], list[str]]] = {
    "html": html_paragraphs,
    "pod": pod_paragraphs,
    "dictionary": dictionary_paragraphs,
}


def _pages(source: DebianPackage, root: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and paragraphs of every document of a source that is unpacked below `root`."""
    if source.format == "bible":
        yield from _books(root)
        return
    for file in sorted(root.glob(source.files)):
        paragraphs = _FORMATS[source.format](file.read_bytes())
        size = len(paragraphs) if source.format != "dictionary" else ENTRIES
        for start in range(0, len(paragraphs), size):
            yield f"{file.relative_to(root)}#{start}", paragraphs[start : start + size]


def _books(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The books of the Bible, one paragraph per verse, as its reader prints them ("Ge1:1 In the beginning …")."""
    command = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    books: dict[str, list[str]] = {}
    _, *verses = re.split(r"^(\w*?[A-Za-z]+)\d+:\d+ ", printed, flags=re.MULTILINE)
    for book, verse in zip(verses[::2], verses[1::2], strict=True):
        books.setdefault(book, []).append(verse)
    yield from books.items()


def gather(out: Path, sources: Sequence[DebianPackage] = SOURCES) -> Iterator[str]:
    """Fetch the sources and write their documents to `out`, JSON Lines; yield a line of progress per source.

    Paragraphs that occurred before, in any source, are left out. Held-out sources come first, so what they share with
    the others is missing from the training text.

    Raises:
        SinklensError: a package cannot be fetched, or `out` cannot be written.
    """
    seen = set[bytes]()
    with atomic_write(out) as part, part.open("w") as lines:
        for source in sorted(sources, key=lambda source: not source.held_out):
            with tempfile.TemporaryDirectory() as folder:
                _fetch(source, Path(folder))
                characters = 0
                for name, paragraphs in _pages(source, Path(folder)):
                    text = "\n".join(_new(paragraphs, seen))
                    if text:
                        characters += len(text)
                        lines.write(json.dumps(asdict(Document(source.package, name, source.held_out, text))) + "\n")
            yield f"{source.package}: {characters / 1e6:.1f} million characters"


def _new(paragraphs: Sequence[str], seen: set[bytes]) -> Iterator[str]:
    """The paragraphs that are prose and were not seen before, each on one line."""
    for paragraph in paragraphs:
        line = " ".join(paragraph.split())
        digest = hashlib.blake2b(line.lower().encode(), digest_size=12).digest()
        if is_prose(line) and digest not in seen:
            seen.add(digest)
            yield line


def _fetch(source: DebianPackage, folder: Path) -> None:
    """Download a package, and those that it needs to be read, and unpack them in `folder`."""
    for package in (source.package, *source.readers):
        try:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SinklensError(
                f"could not download Debian's package {package} ({error}). On Debian or Ubuntu, run `apt-get update` "
                f"first; a package of another release may have another name: pass sources=."
            ) from error
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", file.name, "."], cwd=folder, check=True)


def read_documents(file: Path) -> list[Document]:
    """The documents that `gather` wrote.

    Raises:
        SinklensError: there is no such file, or it is not one of `gather`.
    """
    try:
        return [Document(**json.loads(line)) for line in file.read_text().splitlines()]
    except FileNotFoundError as error:
        raise SinklensError(f"{file} does not exist; gather the text first: python -m training.text {file}") from error
    except (ValueError, TypeError) as error:
        raise SinklensError(f"{file} is not a file of documents ({error}); gather the text again.") from error


if __name__ == "__main__":
    import sys

    for progress in gather(Path(sys.argv[1])):
        print(progress, flush=True)
