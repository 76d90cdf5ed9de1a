"""Who may talk to the lab, and what a page of it may do.

The lab runs a model for whoever can reach it, so it is protected as a notebook server is. A request passes, in order:

- *Host*: the name in the request must be one of the lab's. A page that has its own name resolve to 127.0.0.1 (DNS
  rebinding) sends its own name.
- *Origin* and *Sec-Fetch-Site*: a browser adds them to requests that a page of another site makes. Requests that change
  something need a matching Origin, or the token as a header, which another site's page cannot send.
- *Token*: 256 random bits, in a form or in a header, never in an address, which browsers and logs keep. The form sets
  a cookie with a random value of its own, which scripts cannot read and other sites' pages do not send. Both are
  compared in constant time. Without either there is only the form, and the page's scripts and styles.
- *Frame*: a notebook at localhost is another site than 127.0.0.1, so its frame gets no cookie. A page that is framed is
  sent only for the form with the token, never for the cookie. It holds the token and sends it as a header.
- *Size*: a body has at most `MOST_BYTES`, and one length.
- *Number*: of more than `MOST_REQUESTS` requests under way, the newest are asked to come again.

Connections that send no request are closed (connections.py).

Every response forbids scripts and requests other than the lab's own files and API, framing, caching and referrers.

The lab listens on this machine only; an SSH tunnel reaches it from another.
"""

import asyncio
import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sinklens.live.refusal import Refused, require

MOST_BYTES = 1_000_000  # of a request's body
MOST_HEAD = 262_144  # bytes of a request's head, with the cookies of all programs on this machine
MOST_REQUESTS = 512  # under way at once
LINGER = 1.0  # seconds for which the body of a refused request is read
TOKEN_HEADER = "x-sinklens-token"
WRONG_TOKEN = "the token is missing or wrong; open the lab's address again and enter the token that it printed."
NAMES = ("127.0.0.1", "localhost")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)
FRAMED_BY = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"  # notebooks on this machine
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
SAFE = ("GET", "HEAD")
FILES = ("/static/", "/frame")  # of the page; they hold nothing of the lab's models and runs
FRAMES = ("iframe", "frame", "embed", "object")  # Sec-Fetch-Dest of a page inside another


@dataclass(frozen=True)
class Guard:
    """What requests are checked against.

    Attributes:
        token: the token.
        port: where the lab listens.
        framed: whether a page of this machine may show the lab in a frame, as a notebook does.
        session: value of the cookie, which is not the token: cookies ignore ports, so a server at another port of this
            host sees it.
    """

    token: str
    port: int
    framed: bool = False
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie(self) -> str:
        """Name of the cookie, in which the port distinguishes labs."""
        return f"sinklens-lab-{self.port}"

    def headers(self) -> dict[str, str]:
        """Headers of every response."""
        ancestors = FRAMED_BY if self.framed else "'none'"
        found = HEADERS | {"Content-Security-Policy": POLICY.format(ancestors=ancestors)}
        return found if self.framed else found | {"X-Frame-Options": "DENY"}

    @property
    def frame_policy(self) -> str:
        """The policy of the document that the page shows in a frame, beside the one in the document."""
        return f"sandbox allow-scripts; frame-ancestors 'self'{' ' + FRAMED_BY if self.framed else ''}"

    def check(self, scope: Scope) -> None:
        """Refuse a request that may not pass.

        Raises:
            Refused: it may not; the text does not say what would have been right.
        """
        given = Headers(scope=scope)
        host = _one(given, "host")
        require(
            host in [f"{name}:{self.port}" for name in NAMES],
            "this address is not the lab's; open the one it printed.",
            421,
        )
        origin, site, header = (_one(given, name) for name in ("origin", "sec-fetch-site", TOKEN_HEADER))
        entering = scope["path"] == "/"  # a link from elsewhere may lead here, and the form of a file (`LabApp.enter`)
        form = entering and scope["method"] == "POST"
        foreign = "requests from pages of other sites are refused."
        require(form or origin in (None, f"http://{host}"), foreign, 403)
        require(entering or site in (None, "same-origin"), foreign, 403)
        require(
            form or scope["method"] in SAFE or origin is not None or header is not None,
            f"a request that changes something needs an Origin, or the token as {TOKEN_HEADER}.",
            403,
        )
        require(entering or scope["path"].startswith(FILES) or self.admits(given), WRONG_TOKEN, 403)

    def admits(self, given: Headers) -> bool:
        """Whether the headers of a request have the token, or the cookie."""
        if (header := _one(given, TOKEN_HEADER)) is not None:
            return self.accepts(header)
        return any(self.accepts(value, self.session) for value in _values(given, self.cookie))

    def accepts(self, offered: str, expected: str | None = None) -> bool:
        """Whether `offered` is the token, or `expected`, compared in constant time."""
        return hmac.compare_digest(offered.encode("utf-8", "replace"), (expected or self.token).encode())


def framing(destination: str | None) -> bool:
    """Whether a Sec-Fetch-Dest header says that a page is loaded into another."""
    return destination in FRAMES


def _one(given: Headers, name: str) -> str | None:
    """A header; one that occurs twice is refused, since two programs may read different ones."""
    found = given.getlist(name)
    require(len(found) < 2, f"the header {name} occurs twice.")
    return found[0] if found else None


class Guarded:
    """An ASGI application behind a `Guard`."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard, self._under_way = app, guard, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that passes, and refuse any other."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the lab has no WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        sender = _with_headers(send, self._guard.headers())
        self._under_way += 1
        try:
            require(self._under_way <= MOST_REQUESTS, f"{MOST_REQUESTS} requests are under way; try again.", 503)
            self._guard.check(scope)
            _check_length(Headers(scope=scope))
        except Refused as refusal:
            headers = {"Connection": "close"} | ({"Retry-After": "1"} if refusal.status == 503 else {})
            await JSONResponse(refusal.body, refusal.status, headers)(scope, receive, _lingering(sender, receive))
        else:
            await self._app(scope, receive, sender)
        finally:
            self._under_way -= 1


def _values(given: Headers, name: str) -> list[str]:
    """The values of a cookie; those of other programs, which may follow no syntax, are not read."""
    pairs = (part.partition("=") for line in given.getlist("cookie") for part in line.split(";"))
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def _lingering(send: Send, receive: Receive) -> Send:
    """`send` that reads what the client still sends before the end of the response.

    The connection of a refused request is closed. Closed with unread data it would be reset, and the answer be lost.
    """

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    while (await receive()).get("more_body"):
                        pass
            message = {"type": "http.response.body"}
        await send(message)

    return sender


def _check_length(given: Headers) -> None:
    """Refuse a body that says it is too large, or gives its length twice, since a proxy may read the other one.

    A body that does not say its length is counted while it is read.
    """
    length, encoding = _one(given, "content-length"), _one(given, "transfer-encoding")
    require(length is None or encoding is None, "a request has Content-Length or Transfer-Encoding, not both.")
    if length is not None:
        require(length.isascii() and length.isdigit() and len(length) < 20, "Content-Length is not a number.")
        require(int(length) <= MOST_BYTES, f"a request has at most {MOST_BYTES:,} bytes; got {int(length):,}.", 413)


def _with_headers(send: Send, extra: dict[str, str]) -> Send:
    """`send` with headers added to the response; a response's own header of the same name wins."""

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in extra.items():
                headers.setdefault(name, value)
        await send(message)

    return sender
