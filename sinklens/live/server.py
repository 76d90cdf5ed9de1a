"""Starts a lab: binds the socket, makes the token, and serves until it is closed.

The socket is bound before the server starts, so the printed address is right even where the system chose the port. A
port in use is an error before any model is loaded. The address is printed and opened once the server listens.

All users of a machine see the arguments of its processes, and a browser keeps the addresses it opened. So the token is
in neither: the browser is given a file that only this user can read, whose form sends the token (`private_page`).
"""

import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.errors import SinklensError

if TYPE_CHECKING:
    from sinklens.live.session import LabModel

EXTRA = (
    "the lab needs Starlette and uvicorn, which are not installed; install them with "
    'pip install "sinklens[lab]" (or pip install starlette uvicorn).'
)
HOST = "127.0.0.1"
GRACE = 2  # seconds that open connections get when the lab closes
IDLE = 30  # seconds that a connection stays open for its next request; clients close theirs earlier


def require_extra() -> None:
    """Check that the extra ``lab`` is installed.

    Raises:
        SinklensError: it is not installed.
    """
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise SinklensError(EXTRA) from error
    _ = starlette, uvicorn


def bound(port: int) -> socket.socket:
    """A socket that listens at this machine's own address; port 0 takes a free one.

    Raises:
        SinklensError: the port cannot be used.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise SinklensError(f"cannot listen at {HOST}, port {port}: {error}. Choose another --port.") from error
    return listener


@contextmanager
def private_page(lab: "Lab") -> Iterator[Path]:
    """A file that opens the lab and that only this user can read; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="sinklens-lab-") as folder:  # readable by this user only
        file = Path(folder) / "open.html"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(lab._entering())
        yield file


class Lab:
    """A running lab. In a notebook it shows itself; ``with`` closes it.

    Attributes:
        address: where it is; it opens the lab in a browser that has entered the token.
        token: what everyone who uses it needs.
    """

    def __init__(
        self,
        models: "Sequence[LabModel]",
        *,
        keep: Path | None,
        listener: socket.socket,
        framed: bool,
    ) -> None:
        import uvicorn

        from sinklens.live.app import build_app
        from sinklens.live.connections import Connection
        from sinklens.live.security import MOST_HEAD, Guard
        from sinklens.live.session import Session

        port = listener.getsockname()[1]
        self._guard = Guard(secrets.token_urlsafe(32), port, framed)
        self.address = f"http://{HOST}:{port}/"
        self.token = self._guard.token
        self._listener, self._session = listener, Session(list(models), keep)
        config = uvicorn.Config(
            build_app(self._session, self._guard), log_level="warning", access_log=False, lifespan="off",
            server_header=False, date_header=False, ws="none", timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=IDLE, h11_max_incomplete_event_size=MOST_HEAD, proxy_headers=False, http=Connection,
        )  # fmt: skip

        class Server(uvicorn.Server):
            """Says when it listens, and at its end closes the streams of events before it waits for connections."""

            async def startup(server, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                self._listens.set()

            async def shutdown(server, sockets: list[socket.socket] | None = None) -> None:
                self._session.events.close()
                await super().shutdown(sockets)

        self._server = Server(config)
        self._thread: threading.Thread | None = None
        self._listens = threading.Event()

    def serve(self, opened: Callable[[], None] | None = None) -> None:
        """Serve in this thread until it is interrupted.

        Args:
            opened: called in another thread once the server listens.
        """

        def wait() -> None:
            self._listens.wait()
            if opened is not None and not self._server.should_exit:
                opened()

        threading.Thread(target=wait, name="sinklens-lab-opened", daemon=True).start()
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listens.set()
            self._session.close()
            self._listener.close()

    def start(self) -> "Lab":
        """Serve in a thread; returns once the server listens."""
        self._thread = threading.Thread(target=self.serve, name="sinklens-lab", daemon=True)
        self._thread.start()
        self._listens.wait()
        return self

    def close(self) -> None:
        """Stop the run under way and end the lab; runs in a folder given as ``keep`` remain there."""
        self._server.should_exit = True
        self._session.events.close()
        if self._thread is not None:
            self._thread.join(15)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Lab({self.address})"  # without the token: notebooks are shared with their outputs

    def _form(self, text: str, target: str = "_self") -> str:
        """A form that opens the lab: an address with the token would stay in the browser's history."""
        return (
            f'<form method="post" action="{self.address}" target="{target}" rel="noreferrer">'
            f'<input type="hidden" name="token" value="{self.token}"><button>{text}</button></form>'
        )

    def _entering(self) -> str:
        """A document that opens the lab by itself."""
        return (
            f'<!doctype html><title>sinklens lab</title><meta name="referrer" content="no-referrer">'
            f"{self._form('Open the lab')}<script>document.forms[0].submit()</script>"
        )

    def _repr_html_(self) -> str:
        """The lab in a frame; the token is in it too, and opens nothing once the lab is closed."""
        return (
            f'<iframe srcdoc="{escape(self._entering())}" title="sinklens lab" width="100%" height="900" '
            f'style="border:0" allow="clipboard-write {self.address}"></iframe>'
            f"{self._form('Open the lab in a tab', '_blank')}"
        )


def lab(
    model: Any,
    *,
    compare: Any = (),
    keep: str | Path | None = None,
    port: int = 0,
    **loading: Any,
) -> Lab:
    """Open the lab in a notebook: ``sinklens.lab(model)`` shows it in the cell.

    The lab listens at 127.0.0.1 only, and requires a random token. Do not use the model elsewhere while the
    lab runs it.

    Args:
        model: a `Model`, or anything `sinklens.load` accepts.
        compare: a further model, or several, for the same prompts.
        keep: folder for the runs; by default they are deleted when the lab closes.
        port: the port; 0 takes a free one.
        **loading: arguments of `sinklens.load`, for models given by name or folder.

    Returns:
        The lab, with ``address``, ``token`` and ``close()``.

    Raises:
        SinklensError: the extra ``lab`` is not installed, or the port is in use.
    """
    require_extra()
    from sinklens.live.loading import lab_models

    listener = bound(port)
    try:
        others = compare if isinstance(compare, Sequence) and not isinstance(compare, str) else [compare]
        models, folder = lab_models([model, *others], **loading), None if keep is None else Path(keep)
        opened = Lab(models, keep=folder, listener=listener, framed=True)
    except BaseException:
        listener.close()
        raise
    return opened.start()
