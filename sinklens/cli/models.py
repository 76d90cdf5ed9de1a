"""The commands about models without sampler settings: demo, lab, hooks and models."""

import re
import webbrowser
from contextlib import suppress
from pathlib import Path

from sinklens.cli.options import Described, Device, Integer, Loading, Names
from sinklens.cli.writing import write_figure
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import on_console, say

PROBLEM = 14


def demo(*, out: Path = Path("sinklens-demo"), real: bool = False, loading: Device | None = None) -> None:
    """Trace both twins on one held-out problem.

    Args:
        out: folder for the results
        real: trace smollm2-135m-masked and smollm2-135m-causal, after `sinklens fetch smollm2-135m`; takes minutes
    """
    from rich.console import Console

    from sinklens.model import fetching, load
    from sinklens.runs import generate
    from sinklens.tasks.word_problems import held_out
    from sinklens.utils.folders import check_folder
    from sinklens.views import report, sink_paths, terminal

    check_folder(out, "a demo")
    asked, console = held_out()[PROBLEM], Console(highlight=False)
    names = tuple(reversed(fetching.ARMS)) if real else ("tiny-llada", "tiny-llama")
    runs = [generate(load(name, **loading or {}), asked.prompt) for name in names]
    tracks = [run.sinks for run in runs if run.sinks is not None]
    for run, track in zip(runs, tracks, strict=True):
        track.save(out / f"{run.model.name}.sinks.nc")
        report(run, out / f"{run.model.name}.html")
    write_figure(out / "sinks.png", sink_paths(tracks))
    answers = [f"{run.model.name}: {run.text.strip()}\n" for run in runs]
    write_file(out / "answers.txt", "\n".join([f"{asked.prompt}\n", *answers]))
    for run, kind in zip(runs, ("diffusion", "autoregressive"), strict=True):
        console.rule(f"{run.model.name} ({kind}, {run.steps_run} steps)")
        console.print(on_console(asked.prompt, keep="\n"))
        terminal.show(run.model, run, console)
        console.print(on_console(f"Answer: {run.text.strip()}   (correct: {asked.result})"), "")
    console.print(
        f"Written to {out}/: answers.txt, sinks.png (the sinks of both models at every step), the sink "
        f"tracks (open with sinklens.SinkTrack.open), and a page per model to step through:", markup=False,
    )  # fmt: skip
    for run in runs:
        console.print(f"  open {(out / f'{run.model.name}.html').resolve().as_uri()}", markup=False, soft_wrap=True)


def lab(
    model: str,
    /,
    *,
    compare: Names = (),
    keep: Path | None = None,
    port: Integer = 0,
    no_browser: bool = False,
    loading: Loading | None = None,
) -> None:
    """Open a live lab in the browser.

    Args:
        model: shipped name, hub name or folder; see `sinklens models`
        compare: further models for the same prompts (default: none)
        keep: folder in which runs are kept; those already there are opened (default: runs are deleted when the lab
            closes)
        port: port; 0 is a free one
        no_browser: only print the address and the token, and open nothing
    """
    from sinklens.live.server import Lab, bound, private_page, require_extra

    require_extra()
    listener = bound(port)
    from sinklens.live.loading import lab_models

    opened_lab = Lab(lab_models([model, *compare], **loading or {}), keep=keep, listener=listener, framed=False)
    with private_page(opened_lab) as file:

        def opened() -> None:
            say(f"The lab is open at {opened_lab.address}", f"Its token is {opened_lab.token}")
            say("Anyone on this machine who has the token can use the lab. Ctrl+C closes it.")
            if not no_browser:
                webbrowser.open(file.as_uri())

        with suppress(KeyboardInterrupt):  # depending on when Ctrl+C comes, the server returns or raises
            opened_lab.serve(opened)
    say("", "The lab is closed." + (f" Its runs are in {keep}." if keep else ""))


def hooks(model: str, /, *, all: bool = False, loading: Described | None = None) -> None:
    """List the hook points of a model.

    Args:
        model: shipped name, hub name or folder
        all: list every layer, not one line for all layers
    """
    from sinklens.families import translate
    from sinklens.families.registry import family_of
    from sinklens.hooks import architecture_of, names
    from sinklens.hooks.tree import HookTree
    from sinklens.model.files import find_checkpoint, read_config
    from sinklens.model.loading import build_empty

    given = loading or {}
    folder = find_checkpoint(model, given.get("revision"))
    raw = read_config(folder)
    family = family_of(raw, str(folder), given.get("family"), given.get("block_length"))
    config = translate(raw, family, str(folder))
    tree = HookTree(build_empty(config, family.model_class), architecture_of(config.model_type), family.drawn)
    cfg, points = tree.cfg, tree.point_names()
    sizes = {
        "head": cfg.n_heads, "kv_head": cfg.n_key_value_heads, "d_model": cfg.d_model, "d_head": cfg.d_head,
        "d_mlp": cfg.d_mlp, "vocab": cfg.d_vocab, "expert": cfg.num_experts or 0, "k": cfg.experts_per_token or 0,
    }  # fmt: skip
    rows = dict(names.table(names.merged(tree.parts)))
    say(f"{model}: family {family.name}, {cfg.n_layers} layers, {len(points)} hook points")
    mixed = [layer for layer, one in enumerate(tree.parts) if one.experts]
    experts = f"; layers with experts: {', '.join(map(str, mixed))}" if 0 < len(mixed) < cfg.n_layers else ""
    say(f"l: layer, 0 to {cfg.n_layers - 1}{experts}")
    for name in points if all else rows:
        spec = rows[re.sub(r"\.\d+\.", ".{l}.", name, count=1)]
        shape = " ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in spec.axes.split())
        say(f"{name:36s} [{shape:44s}] {spec.meaning}")


def fetch(model: str, /) -> None:
    """Download the weights of a model, unless they are there.

    Args:
        model: smollm2-135m
    """
    from sinklens.model import fetching

    folder = fetching.fetch(model)
    names = ", ".join((fetching.BASE, *fetching.ARMS))
    say(f"{fetching.BASE} is in {folder}. These names can be loaded now: {names}.")


def models() -> None:
    """List the models that can be loaded."""
    from sinklens.families import FAMILIES
    from sinklens.families.registry import register_installed
    from sinklens.model import fetching
    from sinklens.model.files import shipped_names

    register_installed()
    say("Shipped checkpoints (by name):", *(f"  {name}" for name in shipped_names()), "")
    say(
        f"By name, after `sinklens fetch {fetching.BASE}`:",
        *(f"  {name}" for name in (fetching.BASE, *fetching.ARMS)),
        "",
    )
    say("Families (by hub name, or a folder with config.json and *.safetensors; code in checkpoints is not executed):")
    for family in FAMILIES.values():
        say(f"  {family.name:10s} {family.recognized}; sampler {family.sampler}")
        sizes = " and ".join(f"{number:,}" for number in family.parameters)
        about = {"checkpoints": family.checkpoints, "verified": family.verified, "parameters (built, not run)": sizes}
        say(*(f"{'':13s}{name}: {what}" for name, what in about.items() if what))
