"""The local server of the page: loopback only, with a secret address and an origin check."""

from __future__ import annotations

import asyncio
import contextlib
import html
import importlib.resources
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lipscope.engine import OpenModel, load_model
from lipscope.errors import InputError
from lipscope.explore.answers import MOST_LETTERS, Event, Question, question_of
from lipscope.explore.solver import Place, Solver, by_itself, twin
from lipscope.pages import asset, live_data, live_script

HOST = "127.0.0.1"
_HEIGHT = 780  # pixels of a frame
_BEGINS = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness."
)
_LARGEST = 128 * 1024  # bytes of a request
_PATIENCE = 5.0  # seconds until a request must be complete
_MOST_OPEN = 128  # connections
_ALL = "all"  # the part of the page that shows every layer
_BEAT = 1.0  # seconds between keep-alive messages, which detect closed windows
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
_NOTEBOOKS = "http://127.0.0.1:* http://localhost:* vscode-webview:"


class Server:
    """A page about open models, served on this machine only.

    Args:
        models: The open models; the first is selected initially.
        asked: The initial question.
        framed: Whether a notebook may show the page in a frame.
    """

    def __init__(
        self, models: Sequence[OpenModel], asked: Question, *, framed: bool = False
    ) -> None:
        # Questions on every keystroke do not wait for slow ones.
        self.quick = [Solver(model) for model in models]
        self._slow = [Solver(twin(model)) for model in models]
        self._asked = asked
        self._token = secrets.token_urlsafe(24)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((HOST, 0))
        self._socket.listen()  # early connections wait until the server runs
        self._host = f"{HOST}:{self._socket.getsockname()[1]}"
        policy = _POLICY.format(frames=_NOTEBOOKS if framed else "'none'")
        config = uvicorn.Config(
            _Guard(self._app(), self._host, self._token, policy),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=16 * 1024,
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config)

    @property
    def address(self) -> str:
        """The secret address of the page; it grants access."""
        return f"http://{self._host}/{self._token}/"

    def run(self) -> None:
        """Serve until interrupted."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.end()

    def start(self) -> None:
        """Serve in a thread, until `end` or the end of the process."""
        threading.Thread(target=self.run, name="explore", daemon=True).start()

    def end(self) -> None:
        """Stop immediately."""
        self._server.should_exit = self._server.force_exit = True
        for solver in (*self.quick, *self._slow):
            solver.end()

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="lipscope explore" src="{html.escape(self.address)}" '
            f'style="width:100%;height:{_HEIGHT}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Explored at {self.address}: a notebook shows it; `.end()` ends it>"

    # --- routes

    def _app(self) -> Starlette:
        files = {
            "": ("text/html", self._page()),
            "page.js": ("text/javascript", f"{live_script()}\n{_asset('explore.js')}"),
            "page.css": ("text/css", f"{asset('page.css')}\n{_asset('explore.css')}"),
        }
        routes = [
            Route(f"/{name}", Response(text, media_type=kind), methods=["GET"])
            for name, (kind, text) in files.items()
        ]
        return Starlette(routes=[*routes, Route("/ask", self._ask, methods=["POST"])])

    def _page(self) -> str:
        about = [{"name": one.model.name, "encoder": _is_encoder(one.model)} for one in self.quick]
        data = live_data(models=about, asked=vars(self._asked))
        return _asset("explore.html").format(data=data, push=asset("push.html"))

    async def _ask(self, request: Request) -> Response:
        given = await _json_of(request)
        if given is None:
            return _refused(413, "A request should be a small JSON object.")
        try:
            place = Place(*(str(given.pop(name))[:64] for name in Place._fields))
            asked = question_of(given, len(self.quick))
        except (InputError, KeyError) as problem:
            return _refused(400, str(problem))
        return StreamingResponse(
            self._events(place, asked), media_type="text/event-stream; charset=utf-8"
        )

    async def _events(self, place: Place, asked: Question) -> AsyncIterator[bytes]:
        """Stream the events of a question; closed windows are detected by keep-alive messages."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

        def tell(event: Event | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, event)

        if place.part == _ALL:  # other questions of this window concern the previous text
            for one in (*self.quick, *self._slow):
                one.drop(place.window)
        solver = (self.quick if asked.is_quick else self._slow)[asked.model]
        ticket = solver.ask(place, asked, tell)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _BEAT)
                except TimeoutError:
                    yield b":\n\n"
                    continue
                if event is None:
                    return
                yield f"data: {json.dumps(event)}\n\n".encode()
        finally:
            solver.drop(place, ticket)


def served(
    models: Sequence[str | OpenModel], text: str | None = None, *, framed: bool = False
) -> Server:
    """A server of the page, returned after its first answer.

    Raises:
        InputError: If a model cannot be opened, or does not read text.
    """
    if not isinstance(text, str | None):
        raise InputError(f"`text` should be a str. Found `{type(text).__name__}`.")
    opened = by_itself(lambda: [load_model(one) for one in models])
    asked = Question(text=_BEGINS if text is None else text[:MOST_LETTERS])
    server = Server(opened, asked, framed=framed)
    for solver in server.quick:
        if problem := solver.first(asked):
            server.end()
            raise InputError(problem)
    return server


def explore(model: OpenModel, text: str | None = None) -> Server:
    """The live page for an open model, for notebooks.

    The page uses a copy of the module that shares its weights, so that both can run concurrently.
    """
    server = served([twin(load_model(model))], text, framed=True)
    server.start()
    return server


# --- internals


def _refused(status: int, text: str) -> Response:
    return Response(text, status, {"connection": "close"}, media_type="text/plain")


async def _json_of(request: Request) -> dict[str, Any] | None:
    """The JSON object of a request; None if invalid, too large, or too slow."""
    content = b""
    try:
        async with asyncio.timeout(_PATIENCE):
            async for part in request.stream():
                content += part
                if len(content) > _LARGEST:
                    return None
        found = json.loads(content)
    except (TimeoutError, ClientDisconnect, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class _Guard:
    """Refuse requests that do not come from this page at its secret address.

    The check of ``Host`` prevents DNS rebinding; that of ``Origin``, cross-site requests.
    """

    def __init__(self, app: ASGIApp, host: str, token: str, policy: str) -> None:
        self._app, self._host, self._token = app, host, token
        self._headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        why = self._why_not(scope)
        if why is not None:
            await _refused(*why)(scope, receive, guarded)
            return
        inside = dict(scope)
        inside["path"] = scope["path"][1 + len(self._token) :]
        await self._app(inside, receive, guarded)

    def _why_not(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope.get("headers", ()):
            headers.setdefault(name, []).append(value)
        allowed = [name.encode() for name in (self._host, self._host.replace(HOST, "localhost"))]
        hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(hosts) != 1 or hosts[0] not in allowed:
            return 403, "This page is local; forward the port to use it from another machine."
        if any(one != b"http://" + hosts[0] for one in origins):
            return 403, "Requests from other pages are refused."
        parts = scope["path"].encode().split(b"/", 2)
        if len(parts) < 3 or not secrets.compare_digest(parts[1], self._token.encode()):
            return 404, "Not found: open the address that `lipscope explore` printed."
        if scope["method"] == "POST":
            if not origins:
                return 403, "Questions come from the page."
            sizes = headers.get(b"content-length", [b"0"])
            if not sizes[0].isdigit() or int(sizes[0]) > _LARGEST:
                return 413, f"A request should have at most {_LARGEST:,} bytes."
        return None


class _Uvicorn(uvicorn.Server):
    """A server that stops immediately on Ctrl-C, even with open connections."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Exit without waiting for connections."""
        self.force_exit = True
        super().handle_exit(sig, frame)


class _Protocol(H11Protocol):
    """HTTP with a limited number of connections, closed when idle."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept a connection unless there are too many."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > _MOST_OPEN:
            transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after a connection."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _is_encoder(model: OpenModel) -> bool:
    """Whether the model's class has no language-model head."""
    named = (type(model.model).__name__, *(getattr(model.config, "architectures", None) or ()))
    return not any(part in name for name in named for part in ("CausalLM", "LMHead"))


def _asset(name: str) -> str:
    return (importlib.resources.files("lipscope.explore") / "assets" / name).read_text("utf-8")
