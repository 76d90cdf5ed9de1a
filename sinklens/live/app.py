"""The lab's web application: the page, its files, and its API, as described in docs/concepts/lab.md.

Every handler reads JSON and returns JSON; a refusal and an error of sinklens become ``{"error": sentence}``. Names in
addresses are looked up among what exists and are never part of a file's path.
"""

import asyncio
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sinklens.errors import SinklensError
from sinklens.live import comparing, forms, page, problems, reading
from sinklens.live.detail import check_index, detail, maps_of_layer, packed
from sinklens.live.heads import begin_trial
from sinklens.live.refusal import Refused, require
from sinklens.live.script import script
from sinklens.live.security import MOST_BYTES, POLICY, Guard, Guarded, framing
from sinklens.live.session import Session
from sinklens.utils.documents import parse_json
from sinklens.utils.versions import version_of

PATIENCE = 30  # seconds that the body of a request may take
REMEMBERED = 64  # results that are not computed again
MOST_STREAMS = 32  # tabs that follow the events at once
Handler = Callable[[Request], Awaitable[Response]]


def build_app(session: Session, guard: Guard) -> ASGIApp:
    """The application behind its guard."""
    return Guarded(LabApp(session, guard).starlette(), guard)


class LabApp:
    """The handlers of one lab."""

    def __init__(self, session: Session, guard: Guard) -> None:
        self._session, self._guard = session, guard
        self._results: OrderedDict[tuple[Any, ...], Future[Any]] = OrderedDict()
        self._streams = 0

    def starlette(self) -> Starlette:
        """The routes."""
        session = self._session
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/", self.page),
            ("POST", "/", self.enter),
            ("GET", "/static/{name}", self.file),
            ("GET", "/frame", self.frame),
            ("GET", "/api/session", self.describe),
            ("GET", "/api/tasks/{task}/{index}", self.problem),
            ("GET", "/api/token", self.token),
            ("GET", "/api/events", self.events),
            ("POST", "/api/runs", _doing(self.submit, 202, body=True)),
            ("GET", "/api/runs/{run}", _doing(partial(detail, session))),
            ("DELETE", "/api/runs/{run}", _doing(session.remove)),
            ("POST", "/api/runs/{run}/cancel", _doing(session.cancel, 202)),
            ("POST", "/api/runs/{run}/heads", _doing(partial(begin_trial, session), 202, body=True)),
            ("GET", "/api/runs/{run}/maps", self.maps),
            ("GET", "/api/runs/{run}/pattern", self.pattern),
            ("GET", "/api/runs/{run}/proposals", self.proposals),
            ("GET", "/api/runs/{run}/certainty", self.certainty),
            ("GET", "/api/runs/{run}/lens", self.lens),
            ("GET", "/api/runs/{run}/python", self.python),
            ("GET", "/api/runs/{run}/page", self.report),
            ("GET", "/api/compare", self.compare),
        ]
        routes = [Route(path, _sentences(handler), methods=[method]) for method, path, handler in table]
        return Starlette(routes=routes)

    # The page

    async def page(self, request: Request) -> Response:
        """The page, or the form that asks for the token."""
        if framing(request.headers.get("sec-fetch-dest")) or not self._guard.admits(request.headers):
            return _form()
        return Response(page.document(), media_type="text/html")

    async def enter(self, request: Request) -> Response:
        """Sets the cookie for the token in a form and leads to the page; in a notebook's frame, the page itself."""
        form = parse_qs((await _content(request, "application/x-www-form-urlencoded")).decode("latin-1"))
        token = form.get("token", [""])[0].strip()
        if not self._guard.accepts(token):
            return _form("This token is wrong.")
        if self._guard.framed and framing(request.headers.get("sec-fetch-dest")):
            return Response(page.document(token), media_type="text/html")
        response = Response(page.ENTERED, media_type="text/html")
        response.set_cookie(self._guard.cookie, self._guard.session, httponly=True, samesite="strict")
        return response

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        found = page.files().get(request.path_params["name"])
        if found is None:
            raise Refused("no such file.", 404)
        return Response(found[1], media_type=found[0])

    async def frame(self, request: Request) -> Response:
        """The document in which attention heads are drawn; it has no access to the lab."""
        headers = {"Content-Security-Policy": self._guard.frame_policy, "X-Frame-Options": "SAMEORIGIN"}
        return Response(page.frame(), media_type="text/html", headers=headers)

    async def describe(self, request: Request) -> Response:
        """What the page offers, and the history of runs."""
        models = self._session.models
        return JSONResponse(
            {
                "models": [forms.of_model(name, entry.model) for name, entry in models.items()],
                "settings": {name: forms.of_settings(entry.model) for name, entry in models.items()},
                "chips": forms.of_chips(),
                "tasks": problems.listed(),
                "example": problems.example(),
                "runs": self._session.runs(),
                "kept": self._session.history.kept,
                "event": self._session.events.newest,
                "version": version_of("sinklens"),
            }
        )

    async def problem(self, request: Request) -> Response:
        """A problem of a task."""
        task, index = request.path_params["task"], _integer(request.path_params["index"], "a problem's index")
        found = problems.problem(task, index)
        return JSONResponse({"prompt": found.prompt, "reference": found.reference, "size": len(problems.samples(task))})

    async def token(self, request: Request) -> Response:
        """The id of a token, from its text."""
        model = self._session.model(_word(request, "model"))
        return JSONResponse(forms.token_of(model, _word(request, "text")))

    async def events(self, request: Request) -> Response:
        """The events as they come."""
        require(
            self._streams < MOST_STREAMS, f"{MOST_STREAMS} tabs follow this lab, which is the most; close one.", 429
        )
        last = request.headers.get("last-event-id") or request.query_params.get("since")
        number = self._session.events.newest if last is None else _integer(last, "an event's number", 19)

        async def follow() -> Any:
            self._streams += 1
            try:
                async for text in self._session.events.follow(number):
                    yield text
            finally:
                self._streams -= 1

        return StreamingResponse(follow(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    # Runs

    def submit(self, body: Any) -> Any:
        """Queue a run."""
        return {"run": self._session.submit(body)}

    async def maps(self, request: Request) -> Response:
        """The scores and sinks of a layer, as the figures read them; -1: the mean over all heads."""
        run, text = self._session.run(request.path_params["run"]), _word(request, "layer")
        layer = None if text == "-1" else _number(request, "layer")
        return JSONResponse(await asyncio.to_thread(maps_of_layer, self._session, run, layer))

    async def pattern(self, request: Request) -> Response:
        """The attention pattern of a step and layer."""
        run, step, layer = request.path_params["run"], _number(request, "step"), _number(request, "layer")
        _, outcome = self._session.outcome(run)
        check_index("step", step, outcome.steps)
        check_index("layer", layer, outcome.score.shape[1])

        found = await self._read(reading.patterns, run, step, (layer,))
        return JSONResponse(packed(found[layer].numpy()) | {"step": step, "layer": layer})

    async def proposals(self, request: Request) -> Response:
        """The proposals for a position at a step."""
        run, step, pos = request.path_params["run"], _number(request, "step"), _number(request, "pos")
        _, outcome = self._session.outcome(run)
        check_index("step", step, outcome.steps)
        check_index("position", pos, outcome.canvas.shape[1])
        found = await self._read(reading.proposals, run, step)
        empty: dict[str, Any] = {"confidence": None, "proposals": []}
        return JSONResponse({"step": step, "pos": pos, "undecided": pos in found} | found.get(pos, empty))

    async def certainty(self, request: Request) -> Response:
        """How sure each step is of each undecided position."""
        return JSONResponse(packed(await self._read(reading.certainty, request.path_params["run"])))

    async def lens(self, request: Request) -> Response:
        """What each layer predicts at a position."""
        run, pos = request.path_params["run"], _number(request, "pos")
        _, outcome = self._session.outcome(run)
        check_index("position", pos, int(outcome.real.sum()))
        return JSONResponse(await self._read(reading.lens, run, pos))

    async def compare(self, request: Request) -> Response:
        """Two runs beside each other; with ``kl=0`` without the divergences, which take passes for every step."""
        ids = [_word(request, name) for name in ("a", "b")]
        runs = [self._session.outcome(run) for run in ids]
        specs, outcomes = [spec for spec, _ in runs], [outcome for _, outcome in runs]
        found = await asyncio.to_thread(comparing.differences, *outcomes)
        why, (kl, free) = comparing.why_not(specs, outcomes), (None, None)
        if why is None and request.query_params.get("kl") != "0":

            def compute() -> Any:
                model, _ = map(self._session.model_of, ids)
                return comparing.divergences(specs, outcomes, model)

            try:
                kl, free = await self._computed(("kl", *ids), compute)
            except (SinklensError, Refused) as error:
                why = str(error)
        right = [self._session.run(run).facts.get("right") for run in ids]
        return JSONResponse(found | {"kl": kl, "kl_free": free, "kl_why": why, "right": right})

    async def python(self, request: Request) -> Response:
        """The script that repeats a run, or two."""
        ids = [request.path_params["run"], *request.query_params.getlist("other")[:1]]
        names = ("run",) if len(ids) == 1 else ("first", "second")
        specs = {name: self._session.spec(run) for name, run in zip(names, ids, strict=True)}
        for spec in specs.values():
            self._session.model(spec.model)
        return PlainTextResponse(script(specs, self._session.loading))

    async def report(self, request: Request) -> Response:
        """The offline report of a run, as a download."""
        run = request.path_params["run"]
        text, name = await self._read(reading.report, run), f"sinklens-{run}"
        return Response(text, media_type="text/html", headers={
            "Content-Disposition": f'attachment; filename="{name}.html"',
            "Content-Security-Policy": "sandbox allow-scripts",  # if a browser shows it, it is not a page of the lab
        })  # fmt: skip

    async def _read(self, read: Callable[..., Any], run: str, *places: Any) -> Any:
        """What `read`, a function of reading.py, finds in a run at `places`, computed in the model thread."""
        spec, outcome = self._session.outcome(run)

        def compute() -> Any:
            return read(spec, outcome, self._session.model_of(run), *places)

        return await self._computed((read.__name__, run, *places), compute)

    async def _computed(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """A result of the model thread; one that several requests want is computed once."""
        future = self._results.get(key)
        if future is None or (future.done() and future.exception() is not None):
            future = self._session.thread.compute(compute)
            self._results[key] = future
            while len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return await asyncio.shield(asyncio.wrap_future(future))


def _form(trouble: str = "") -> Response:
    """The form that asks for the token, and what was wrong with the last one."""
    policy = POLICY.replace("form-action 'none'", "form-action 'self'").format(ancestors="'none'")
    return Response(page.entry(trouble), 403, {"Content-Security-Policy": policy}, media_type="text/html")


def _doing(act: Callable[..., Any], status: int = 200, *, body: bool = False) -> Handler:
    """A handler that calls `act` in a thread, with the names in the address and, with `body`, the request's JSON."""

    async def handle(request: Request) -> Response:
        given = [*request.path_params.values(), *([await _body(request)] if body else [])]
        done = await asyncio.to_thread(act, *given)
        return JSONResponse({} if done is None else done, status)

    return handle


def _sentences(handler: Handler) -> Handler:
    """`handler` with refusals and errors of sinklens as JSON."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refusal:
            return JSONResponse(refusal.body, refusal.status)
        except SinklensError as error:
            return JSONResponse({"error": str(error)}, 400)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 — the page says what happened; the traceback is printed
            traceback.print_exc()
            return JSONResponse({"error": f"the lab crashed with {type(error).__name__}; see the terminal."}, 500)

    return handle


async def _body(request: Request) -> Any:
    """The JSON of a request; raises Refused if it is not JSON, and as `_content`."""
    return parse_json(await _content(request, "application/json"), "the request", Refused)


async def _content(request: Request, expected: str) -> bytes:
    """The body of a request.

    Raises:
        Refused: it is too large, too slow, or not of the media type `expected`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    require(kind == expected, f"the request must be {expected}.", 415)
    parts, size = [], 0
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                size += len(part)
                require(size <= MOST_BYTES, f"a request has at most {MOST_BYTES:,} bytes.", 413)
                parts.append(part)
    except TimeoutError as error:
        raise Refused(f"the request was not complete after {PATIENCE} s.", 408) from error
    return b"".join(parts)


def _number(request: Request, name: str) -> int:
    """An index in the query."""
    return _integer(request.query_params.get(name, ""), f"{name}=")


def _integer(text: str, what: str, most: int = 9) -> int:
    """A number of at most `most` digits."""
    require(text.isascii() and text.isdigit() and len(text) <= most, f"{what} must be a number.")
    return int(text)


def _word(request: Request, name: str) -> str:
    text = request.query_params.get(name)
    if text is None:
        raise Refused(f"{name}= is missing.")
    return text
