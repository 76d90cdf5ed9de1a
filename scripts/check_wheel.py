"""Build the wheel, install it outside the repository, and run the README's examples with it.

An editable install hides what a wheel lacks: a subpackage that pyproject.toml does not list, or a checkpoint that
package-data does not match. The wheel's contents are therefore compared with the folders, and a small script and the
README's examples run in a fresh environment in a temporary folder. The build uses a copy of the sources, because
setuptools leaves a `build/` folder behind and packs its contents, including deleted modules, into the next wheel.

Caveat: the fresh environment needs every dependency; without a package cache this downloads a few hundred MB. Where pip
reaches no package index, nothing is checked: the last line says so, and in continuous integration (CI is set) this is a
failure.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PLACE = {"sinklens": "sinklens", "hooks": "sinklens/hooks", "analyses": "sinklens/analyses"}
"""The location of each folder of the repository in the wheel."""
LARGEST = 40  # MiB

PROBE = """\
import sinklens

assert "site-packages" in sinklens.__file__, f"not the installed package: {sinklens.__file__}"
prompt = "Question: Tom has 3 apples. He buys 4 more. How many apples does Tom have now?\\nAnswer:"
model = sinklens.load("tiny-llada")
with sinklens.trace(model, prompt) as t:
    for step in t.steps:
        pattern = t["blocks.2.attn.hook_pattern"]
text = t.text if isinstance(t.text, str) else t.text[0]
assert text.strip(), "the trace generated no text"
from sinklens.views import report
assert "</html>" in report(t, "run.html").read_text(), "the page is incomplete"
print(text.strip())
"""
"""Run from a file and not with `-c`, as nnsight reads the source of a traced block; the README's examples follow."""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run `command` outside the repository and return its standard output; exit with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**environment, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(scratch: Path) -> Path:
    """Build the wheel from the sdist of a copy of the sources."""
    sources = scratch / "sources"
    sources.mkdir()
    for folder in PLACE:
        shutil.copytree(ROOT / folder, sources / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    # The build runs in an isolated environment; only this variable pins its packages.
    pinned = {"PIP_CONSTRAINT": CONSTRAINTS.as_uri()}
    run(sys.executable, "-m", "build", "--outdir", scratch / "dist", sources, cwd=scratch, **pinned)
    (wheel,) = (scratch / "dist").glob("*.whl")
    return wheel


def expected_files() -> set[str]:
    """The files that belong in the wheel: modules of the three folders, the marker for type checkers, data."""
    files = {f"sinklens/{path.relative_to(ROOT / 'sinklens')}" for path in shipped_files()} | {"sinklens/py.typed"}
    for folder, place in PLACE.items():
        files |= {f"{place}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}
    return files


def shipped_files() -> list[Path]:
    """Every file of the shipped checkpoints, autoencoders, pages and protocols."""
    folders = ("model/shipped", "features/shipped", "views/page", "live/static")
    found = [path for folder in folders for path in (ROOT / "sinklens" / folder).rglob("*") if path.is_file()]
    return [*found, ROOT / "sinklens" / "evaluation" / "protocols.toml"]


def check_contents(wheel: Path) -> None:
    """Exit with an error if the contents of the wheel and the folders differ, or the wheel is too large."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("sinklens/")}
    expected = expected_files()
    if missing := sorted(expected - packed):
        sys.exit(f"the wheel lacks {missing}: list the package or its data in pyproject.toml")
    if surplus := sorted(packed - expected):
        sys.exit(f"the wheel contains {surplus}, which are neither modules nor shipped data")
    if (size := wheel.stat().st_size / 2**20) > LARGEST:
        sys.exit(f"the wheel has {size:.1f} MiB, more than {LARGEST}: move models that only studies use to models/")
    if not any("/shipped/" in name and name.endswith(".safetensors") for name in packed):
        sys.exit("the wheel contains no checkpoint: sinklens/model/shipped is empty")


def has_index(scratch: Path) -> bool:
    """Whether pip can fetch a package."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        scratch / "index",
        "packaging",
    ]
    return subprocess.run([str(part) for part in command], capture_output=True).returncode == 0


def check_run(wheel: Path, scratch: Path) -> str:
    """The output of the probe and of the README's examples in a fresh environment, without access to the Hub."""
    environment = scratch / "environment"
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir()
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (elsewhere / "probe.py").write_text("\n".join([PROBE, *examples]))
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=scratch)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-compile", "-c", CONSTRAINTS, wheel, cwd=elsewhere)
    return run(python, "probe.py", cwd=elsewhere, HF_HUB_OFFLINE="1")


def main() -> None:
    """Build, compare, install, run."""
    with tempfile.TemporaryDirectory(prefix="sinklens-wheel-") as folder:
        scratch = Path(folder)
        if not has_index(scratch):
            reason = "pip reaches no package index, which a fresh environment needs"
            if os.environ.get("CI"):
                sys.exit(f"nothing was checked: {reason}")
            print(f"skipped: {reason}")
            return
        print("building the wheel", flush=True)
        wheel = build(scratch)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
        check_contents(wheel)
        print("installing it into a fresh environment", flush=True)
        print(check_run(wheel, scratch), end="")
    print("the wheel is complete; a page was written and the README's examples ran with it")


if __name__ == "__main__":
    main()
