"""``sinklens lab``: a live lab in the browser."""

import argparse
import webbrowser
from contextlib import suppress
from pathlib import Path

from sinklens.cli.options import add_loading, loading
from sinklens.errors import SettingError

MORE = """\
Open a live lab in the browser. There you can
  - run a prompt and watch its steps;
  - press "Try every head" to find the heads that carry the answer: each is ablated in turn;
  - click a head, a token or a cell of the attention map to change the run, and compare run B with run A;
  - compare two models (--compare), copy the run as Python, save it as a page.
More: docs/concepts/lab.md (From a question to an answer)."""


def add_lab(lab: argparse.ArgumentParser) -> None:
    """Add the options of ``lab``."""
    lab.description, lab.formatter_class = MORE, argparse.RawDescriptionHelpFormatter
    lab.add_argument("model", metavar="MODEL", help="shipped name, hub name or folder; see `sinklens models`")
    lab.add_argument(
        "--compare", metavar="MODEL", nargs="+", default=[], help="further models for the same prompts (default: none)"
    )
    lab.add_argument(
        "--keep", type=Path, metavar="DIR",
        help="folder in which runs are kept; those already there are opened (default: runs are deleted when the lab "
        "closes)",
    )  # fmt: skip
    lab.add_argument("--port", type=int, default=0, metavar="N", help="port (default: a free one)")
    lab.add_argument("--no-browser", action="store_true", help="only print the link (default: also open it)")
    lab.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="address to listen at; others than this machine's own need --allow-network (default: %(default)s)",
    )  # fmt: skip
    lab.add_argument(
        "--allow-network", action="store_true", help="allow a --host that other machines reach (default: no)"
    )
    lab.add_argument(
        "--public-url", metavar="URL",
        help="address of the lab in a browser behind a reverse proxy, e.g. "
        "https://hub.example.org/user/ann/proxy/{port}/ (default: it is reached directly)",
    )  # fmt: skip
    add_loading(lab)
    lab.set_defaults(command=run_lab)


def run_lab(options: argparse.Namespace) -> None:
    """`sinklens lab`."""
    from sinklens.live.public import read_public
    from sinklens.live.security import is_local
    from sinklens.live.server import Lab, bound, link_file, require_extra, warning_of

    require_extra()
    if not is_local(options.host) and not options.allow_network:
        raise SettingError(
            f"--host {options.host} lets other machines reach the lab, where whoever has its link can run the model. "
            f"Add --allow-network if that is meant; from another machine, ssh -L is safer."
        )
    if not 0 <= options.port < 65_536:
        raise SettingError(f"--port must be from 0 to 65535; got {options.port}.")
    listener = bound(options.host, options.port)
    read_public(options.public_url, listener.getsockname()[1])  # before a model is loaded
    from sinklens.live.loading import lab_models

    models = lab_models([options.model, *options.compare], **loading(options))
    lab = Lab(
        models, keep=options.keep, host=options.host, listener=listener, framed=False, public_url=options.public_url
    )
    print(warning_of(options.host), end="\n" if warning_of(options.host) else "")
    with link_file(lab.url) as file:

        def opened() -> None:
            print(f"The lab is open. Anyone with this link can use it:\n  {lab.url}\nCtrl+C closes it.", flush=True)
            if not options.no_browser:
                webbrowser.open(file.as_uri())

        with suppress(KeyboardInterrupt):  # depending on when Ctrl+C comes, the server returns or raises
            lab.serve(opened)
    print("\nThe lab is closed." + (f" Its runs are in {options.keep}." if options.keep else ""))
