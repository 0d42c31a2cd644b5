"""The server of the page, on this machine's loopback alone.

It answers requests of its own page: a browser says in Host and Origin where a request comes from, and all others are
refused, so that no other site can read through a name that leads here, or send something. Bodies are bounded. It reads
no file for a request but those of the page. Computing takes turns, and stops when nobody waits for it any more.
"""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from types import FrameType, MappingProxyType
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwright.config.base import PlanError
from shardwright.config.phrase import ENGLISH, say, spoken
from shardwright.config.user_file import system_reason
from shardwright.report.page_document import phrases_said
from shardwright.report.plan_parts import PARTS, Part
from shardwright.report.timeline.page import embedded
from shardwright.studio.controls import controls_dict
from shardwright.studio.dropped_file import state_of_files
from shardwright.studio.exports import FORMATS, files
from shardwright.studio.page_state import SUBJECT, PageState
from shardwright.studio.part_process import AFTER_STEP, PART, PartProcess
from shardwright.studio.plan_answer import PlanAnswers, fault_part
from shardwright.studio.plan_search import answers

_MOST_BYTES = 2**20
_MOST_SEARCHES = 2  # at a time
FIRST: Mapping[str, str] = MappingProxyType({"job": "gpt3-175b-1024"})  # the state of a page that nobody gave one
_LINES = "application/x-ndjson"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "style-src-attr 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class BadRequestError(PlanError):
    """A request that the page does not send."""


class OwnPageOnly:
    """A layer around an application that refuses requests of other sites and for other names, and adds headers that
    keep the page to itself."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refused = self._refusal({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
        if scope["method"] == "POST" and refused is None:
            refused = _not_json(dict(scope["headers"]))
        app = self._app if refused is None else PlainTextResponse(refused, status_code=403)
        await app(scope, receive, send_with_headers)

    def _refusal(self, headers: dict[str, str]) -> str | None:
        if headers.get("host", "") not in self._hosts:
            return "This server answers to 127.0.0.1 alone; open the address that it printed."
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in self._hosts}:
            return "Only the page of this server may ask it."
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and "origin" in headers:
            return "Only the page of this server may ask it."
        return None


def _not_json(headers: dict[bytes, bytes]) -> str | None:
    """A refusal of a body that is no JSON: other sites may send forms and texts without asking, and no JSON."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
    return None if kind == b"application/json" else "The body has to be application/json."


class Studio:
    """The answers of the server. Computing takes turns, for two answers at once would both be late; a second process
    makes a part of each. Texts are in a language."""

    def __init__(self, part_process: PartProcess, first: Mapping[str, str], language: str) -> None:
        self._part_process, self._first = part_process, first
        self._language, self._answers = language, PlanAnswers(language)
        self._turn = anyio.CapacityLimiter(1)
        self._searches = anyio.CapacityLimiter(_MOST_SEARCHES)

    async def controls(self, request: Request) -> Response:
        """The description of the page's controls, and the state with which an address without one begins."""
        return self._json(controls_dict() | {"formats": FORMATS, "first": dict(self._first)})

    async def plan(self, request: Request) -> Response:
        """The answer to a state, a line of JSON for each part, as soon as it is known."""
        body = await _body(request)
        names = str(body.get("wanted", "")).split(",")
        wanted = [name for name in names if name in ("values", *PARTS)]
        sent = body.get("known")
        known = {str(name): str(key) for name, key in sent.items()} if isinstance(sent, dict) else {}
        lines = self._lines(request, PageState.read(body.get("state")), wanted, known)
        return StreamingResponse(lines, media_type=_LINES)

    async def _lines(
        self, request: Request, state: PageState, wanted: list[str], known: dict[str, str]
    ) -> AsyncIterator[bytes]:
        async with self._turn:
            if await request.is_disconnected():
                return
            moved = {name for name in (PART, AFTER_STEP) if name in wanted and self._part_process.is_ready}
            if moved == {AFTER_STEP} and len(wanted) == 1:
                moved = set()  # nothing is left to be made beside it
            lines = _lines_of_both(
                self._parts(state, [name for name in wanted if name not in moved], known),
                self._line_of_other(state, known, PART) if PART in moved else None,
                self._traffic(state, known) if AFTER_STEP in moved else None,
            )
            try:
                async for line in lines:
                    if await request.is_disconnected():
                        return
                    yield line
            finally:
                await lines.aclose()  # type: ignore[attr-defined]

    def _line_of_other(self, state: PageState, known: dict[str, str], part: str) -> "asyncio.Future[bytes]":
        """The line of a part that the second process makes; if it has ended, of the part as it is made here."""
        step = self._answers.known_step(state) if part == AFTER_STEP else None

        async def line() -> bytes:
            made = await self._part_process.ask(state, known, part, step)
            return made or await run_in_threadpool(lambda: _line(next(self._parts(state, [part], known))))

        return asyncio.ensure_future(line())

    def _traffic(self, state: PageState, known: dict[str, str]) -> "FurtherPart":
        return FurtherPart(
            partial(self._line_of_other, state, known, AFTER_STEP), self._parts(state, [AFTER_STEP], known)
        )

    async def search(self, request: Request) -> Response:
        """The answers of a search, a line of JSON each. It ends when the page leaves."""
        body = await _body(request)
        question = {
            "asks": str(body.get("asks")),
            "keep": bool(body.get("keep")),
            "state": dict(PageState.read(body.get("state")).texts),
            "language": self._language,
        }
        if self._searches.available_tokens < 1:
            raise PlanError(SUBJECT, [say("{count} searches run already; stop one of them", count=_MOST_SEARCHES)])
        return StreamingResponse(self._search_lines(request, question), media_type=_LINES)

    async def _search_lines(self, request: Request, question: dict[str, Any]) -> AsyncIterator[bytes]:
        async with self._searches:
            searching = answers(question)
            try:
                async for part in searching:
                    if await request.is_disconnected():
                        return
                    yield _line(part)
            finally:
                await searching.aclose()  # type: ignore[attr-defined]

    async def drop(self, request: Request) -> Response:
        """The state that dropped files describe."""
        body = await _body(request)
        sent, system = body.get("files"), str(body.get("system") or "")
        texts = {str(name): str(text) for name, text in sent.items()} if isinstance(sent, dict) else {}
        cluster = PageState.read(body.get("state")).asked.cluster
        return self._json(await run_in_threadpool(state_of_files, texts, system, cluster, self._language))

    async def export(self, request: Request) -> Response:
        """The files of a plan in a format."""
        body = await _body(request)
        state, to = PageState.read(body.get("state")), str(body.get("to", ""))
        async with self._turn:
            return self._json(await run_in_threadpool(lambda: files(state.job(), to, self._language)))

    async def faults(self, request: Request, error: Exception) -> Response:
        """The faults of what a user asked for: an answer as any other, for a browser logs each status of an error as an
        error of the page. A request that no page of this server sends has that status."""
        assert isinstance(error, PlanError)
        part = spoken(fault_part(error), self._language)
        return Response(_line(part), 422 if isinstance(error, BadRequestError) else 200, media_type=_LINES)

    def _parts(self, state: PageState, wanted: Sequence[str], known: dict[str, str]) -> Iterator[Part]:
        return (spoken(part, self._language) for part in self._answers.parts(state, wanted, known))

    def _json(self, content: dict[str, Any]) -> Response:
        return JSONResponse(spoken(content, self._language))


@dataclass(frozen=True)
class FurtherPart:
    """A part that takes the step: the process that is free first makes it. `ask` asks the other process for its line,
    `here` makes it in this one."""

    ask: "Callable[[], asyncio.Future[bytes]]"
    here: Iterator[Part]


async def _lines_of_both(
    parts: Iterator[Part], other: "asyncio.Future[bytes] | None", further: FurtherPart | None = None
) -> AsyncIterator[bytes]:
    """The lines of parts, which are made in a thread, one after the other; and the lines of another process, as soon as
    they are there, but not before the step, and not if the plan has faults. `other` is asked for already. The `further`
    part is asked for once the step is made and the other process has nothing to do, or made here after the parts."""
    own: asyncio.Future[tuple[str, bytes]] | None = _next_line(parts)
    others: set[asyncio.Future[bytes]] = set() if other is None else {other}
    names = list[str]()
    try:
        while own is not None:
            waited: set[asyncio.Future[Any]] = {own, *(others if "step" in names else ())}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if own.done():
                name, line = own.result()
                names.append(name)
                if not name and further is not None and "faults" not in names:
                    parts, further, name = further.here, None, "further"
                own = _next_line(parts) if name else None
                if line:
                    yield line
            for done in [one for one in others & waited if one.done()]:
                others.remove(done)
                yield done.result()
            if further is not None and "step" in names and not others:
                others.add(further.ask())
                further = None
        while others and "faults" not in names:
            done_ones, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            others -= done_ones
            for done in done_ones:
                yield done.result()
    finally:
        for one in others:
            one.cancel()
        with anyio.CancelScope(shield=True):
            if own is not None:
                await own


def _next_line(parts: Iterator[Part]) -> "asyncio.Future[tuple[str, bytes]]":
    """The name and the line of the next part, made in a thread; both are empty if there is none."""

    def made() -> tuple[str, bytes]:
        part = next(parts, None)
        return ("", b"") if part is None else (part["part"], _line(part))

    return asyncio.ensure_future(run_in_threadpool(made))


def _line(part: Part) -> bytes:
    return json.dumps(part, separators=(",", ":")).encode() + b"\n"


async def _body(request: Request) -> dict[str, Any]:
    """The JSON of a request. Raises BadRequestError if it is too long, or no JSON."""
    text = b""
    async for chunk in request.stream():
        text += chunk
        if len(text) > _MOST_BYTES:
            raise BadRequestError(
                SUBJECT, [say("a request has at most {most:,} bytes; drop a smaller file", most=_MOST_BYTES)]
            )
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequestError(SUBJECT, [say("the request is no JSON; reload the page")]) from None
    if not isinstance(body, dict):
        raise BadRequestError(SUBJECT, [say("the request is no JSON object; reload the page")])
    return body


def page_files() -> dict[str, bytes]:
    """The files that a browser gets, by name: those of the page, and the components that it shares with reports."""
    reports = resources.files("shardwright.report")
    folders = (resources.files("shardwright.studio") / "page", reports / "page", reports / "timeline")
    return {
        entry.name: entry.read_bytes()
        for folder in folders
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }


def _file_answer(name: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def file(request: Request) -> Response:
        return Response(content, media_type=_TYPES[name.rpartition(".")[2]])

    return file


def _in_language(index: bytes, language: str) -> bytes:
    """The page's HTML with the translations of what its modules say."""
    scripts = (content.decode() for name, content in page_files().items() if name.endswith(".js"))
    phrases = embedded(phrases_said(scripts, language))
    text = index.decode().replace('<html lang="en">', f'<html lang="{language}">')
    return text.replace("<body>", f'<body>\n  <script type="application/json" id="phrases">{phrases}</script>').encode()


def application(port: int, first: Mapping[str, str] = FIRST, language: str = ENGLISH) -> ASGIApp:
    """The server's application, for the page at http://127.0.0.1:PORT/, in a language."""
    part_process = PartProcess(language)
    studio, page = Studio(part_process, first, language), page_files()
    routes = [
        Route("/", _file_answer("index.html", _in_language(page.pop("index.html"), language))),
        *(Route(f"/page/{name}", _file_answer(name, content)) for name, content in page.items()),
        Route("/controls", studio.controls),
        Route("/plan", studio.plan, methods=["POST"]),
        Route("/search", studio.search, methods=["POST"]),
        Route("/drop", studio.drop, methods=["POST"]),
        Route("/export", studio.export, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes, exception_handlers={PlanError: studio.faults}, lifespan=lambda _: part_process.running()
    )
    return OwnPageOnly(app, frozenset({f"127.0.0.1:{port}", f"localhost:{port}"}))


def listening(port: int) -> socket.socket:
    """A socket of this machine alone at a port; 0 is any free one. Raises PlanError if the port is taken."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        connection.bind(("127.0.0.1", port))
    except OSError as error:
        connection.close()
        fault = say(
            "--port {port}: {reason}; use another, or 0 for any free one", port=port, reason=system_reason(error)
        )
        raise PlanError("studio", [fault]) from None
    return connection


class StudioServer(uvicorn.Server):
    """A server that Ctrl-C ends as it should be ended, and not as an error."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End because of a signal. Answers on their way have the time of a graceful end, after a second Ctrl-C too:
        uvicorn would end by an error."""
        if sig == signal.SIGINT:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def server_at(connection: socket.socket, first: Mapping[str, str] = FIRST, language: str = ENGLISH) -> uvicorn.Server:
    """The server of a page in a language, at a socket: `run(sockets=[connection])` serves it until a signal ends it.
    `first` is the state of an address that says none."""
    config = uvicorn.Config(
        application(connection.getsockname()[1], first, language),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return StudioServer(config)
