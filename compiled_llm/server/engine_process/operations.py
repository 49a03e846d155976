"""The operator's requests over a socket of their own: no client, and no API server's port, may sleep or wake it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compiled_llm.protocol.messages import Ready
from compiled_llm.server.engine_process.engine_server import EngineServer
from compiled_llm.server.engine_process.socket_file import listen, remove

if TYPE_CHECKING:  # imports torch
    from compiled_llm.engine.engine import Engine
    from compiled_llm.server.engine_process.kept_profile import KeptProfile

logger = logging.getLogger("compiled_llm.server")

BodyT = TypeVar("BodyT", bound=Struct)
Answer = dict[str, Any]

_MAX_BYTES = 2**16
_PATIENCE = 5.0  # seconds that the answers which are being sent have at the end


class Nothing(Struct, forbid_unknown_fields=True):
    """A body without fields; it may be left out."""


class SleepArguments(Struct, forbid_unknown_fields=True):
    """The arguments of ``Engine.sleep``."""

    requests: Literal["park", "end"] = "park"
    weights: bool = False
    graphs: bool = False


class UpdateArguments(Struct, forbid_unknown_fields=True):
    """The arguments of ``Engine.update_weights``."""

    folder: str
    requests: Literal["wait", "keep", "end"] = "wait"


class Operations:
    """The operator's requests, in threads of their own; clients of the engine process hear that it sleeps."""

    def __init__(self, server: EngineServer, path: Path, profile: KeptProfile | None = None) -> None:
        """Listen at ``path``, as ``EngineServer``; ``profile`` is saved before the model sleeps: it cannot be then."""
        self._server = server
        self._path = path
        self._profile = profile
        self._listening = listen(path, of="operations_")
        self._engine: Engine | None = None
        self._ready: Ready | None = None
        self._weights: str | None = None
        self._resting = threading.Lock()  # one falls asleep or wakes at a time
        self._updating = threading.Lock()  # host memory has room for the weights once
        routes = [
            Route("/status", self._status, methods=["GET"]),
            self._route("/sleep", SleepArguments, self._sleep),
            self._route("/wake", Nothing, self._wake),
            self._route("/reset_prefix_cache", Nothing, self._reset_prefix_cache),
            self._route("/update_weights", UpdateArguments, self._update_weights),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
        # h11: unlike httptools, it takes no head without an end.
        options: dict[str, Any] = {"http": "h11", "lifespan": "off", "ws": "none", "log_config": None}
        options |= {"access_log": False, "timeout_graceful_shutdown": int(_PATIENCE)}
        self._http = uvicorn.Server(uvicorn.Config(app, **options))
        self._thread = threading.Thread(
            target=self._http.run, args=([self._listening],), name="compiled_llm operations", daemon=True
        )

    # ---- of its engine process

    def start(self) -> None:
        self._thread.start()

    def open(self, engine: Engine, ready: Ready) -> None:
        """Serve the operator from now on, and let the engine process take requests."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of weights that are read; this process is ours
        with self._resting:  # a request to sleep reports that after this
            self._engine, self._ready = engine, ready
            self._server.open(engine, ready)

    def close(self) -> None:
        self._http.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)
        self._listening.close()
        remove(self._path)

    # ---- what is asked for

    def _route(self, path: str, kind: type[BodyT], answer: Callable[[Engine, BodyT], Answer]) -> Route:
        """Return the route of one path, which is answered in a thread: that may take long."""

        async def endpoint(request: Request) -> Response:
            return await _answered(request, lambda: self._done(path, answer, kind, request))

        return Route(path, endpoint, methods=["POST"])

    async def _done(
        self, path: str, answer: Callable[[Engine, BodyT], Answer], kind: type[BodyT], request: Request
    ) -> Answer:
        body = msgspec.json.decode(await _body(request) or b"{}", type=kind)
        if self._engine is None:
            raise HTTPException(503, f"the engine process is not ready ({self._server.doing})")
        began = time.monotonic()
        done = await asyncio.to_thread(answer, self._engine, body)
        seconds = round(time.monotonic() - began, 3)
        logger.info("compiled_llm: %s: %s, %.3f s", path, done, seconds)
        return {**done, "seconds": seconds}

    async def _status(self, request: Request) -> Response:
        asleep = self._engine is not None and self._engine.asleep
        return JSONResponse({"doing": self._server.doing, "asleep": asleep, "weights": self._weights})

    def _sleep(self, engine: Engine, body: SleepArguments) -> Answer:
        with self._resting:
            if self._profile is not None:
                self._profile.save()
            nbytes = engine.sleep(requests=body.requests, weights=body.weights, graphs=body.graphs)
            self._server.report("asleep")
        return {"asleep": True, "bytes": nbytes}

    def _wake(self, engine: Engine, body: Nothing) -> Answer:
        assert self._ready is not None, "it is told with the engine"
        with self._resting:
            engine.wake()
            self._server.open(engine, self._ready)
        return {"asleep": False}

    def _reset_prefix_cache(self, engine: Engine, body: Nothing) -> Answer:
        engine.reset_prefix_cache()
        return {}

    def _update_weights(self, engine: Engine, body: UpdateArguments) -> Answer:
        if not Path(body.folder).is_absolute():
            raise ValueError(
                f"folder={body.folder!r}: give an absolute path; the engine process runs in another folder"
            )
        if not self._updating.acquire(blocking=False):
            raise RuntimeError("update_weights: another update is in progress; wait until it has ended")
        try:
            engine.update_weights(body.folder, requests=body.requests)
            self._weights = body.folder
        finally:
            self._updating.release()
        return {"weights": body.folder}


async def _answered(request: Request, doing: Callable[[], Awaitable[Answer]]) -> Response:
    try:
        return JSONResponse(await doing())
    except (ValueError, msgspec.DecodeError) as error:
        return _refusal(400, str(error))
    except RuntimeError as error:  # the engine does something else, or memory is short
        return _refusal(409, str(error))
    except HTTPException:
        raise
    except Exception as error:
        logger.exception("compiled_llm: %s has failed", request.url.path)
        return _refusal(500, f"{type(error).__name__}: {error}")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise HTTPException(413, f"the body can have {_MAX_BYTES:,} bytes")
    return bytes(body)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, error.detail, error.headers)


def _refusal(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse({"error": message}, status, headers)
