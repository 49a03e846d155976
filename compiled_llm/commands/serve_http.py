"""`compiled-llm serve` over HTTP: a front in this process, and a generator in one of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from compiled_llm.commands.source import Source
from compiled_llm.server.defaults import CLIENT_SECONDS, MAX_CONNECTIONS

if TYPE_CHECKING:  # imports FastAPI, which a generator does not need
    from compiled_llm.server.front.settings import FrontSettings

logger = logging.getLogger("compiled_llm.server")

_DRAIN_SECONDS = "1"
"""Of the generator, which is told to end when all answers have."""


class HttpFlags(NamedTuple):
    """What the command says of HTTP."""

    host: str | None = None
    port: int | None = None
    served_model_name: Sequence[str] = ()
    api_key_file: Path | None = None
    allowed_host: Sequence[str] = ()
    cors_origin: Sequence[str] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    request_seconds: float | None = None
    salt_caches: bool = False
    page: bool = True
    max_connections: int = MAX_CONNECTIONS
    client_seconds: float = CLIENT_SECONDS

    @property
    def given(self) -> bool:
        """Whether it says anything."""
        return self != HttpFlags()

    def settings(self, source: Source, drain_seconds: float) -> FrontSettings:
        """Return the settings of the front.

        Raises:
            ValueError: they contradict each other, or a file is not what it should be.
        """
        from compiled_llm.server.front.settings import FrontSettings, check_certificate, keys_in

        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            check_certificate(self.ssl_certfile, self.ssl_keyfile)
        return FrontSettings(
            names=tuple(self.served_model_name) or (source.public_name,),
            host=self.host or "127.0.0.1",
            port=8000 if self.port is None else self.port,
            api_keys=() if self.api_key_file is None else keys_in(self.api_key_file),
            allowed_hosts=tuple(self.allowed_host),
            cors_origins=tuple(self.cors_origin),
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            request_seconds=self.request_seconds,
            drain_seconds=drain_seconds,
            salts_caches=self.salt_caches,
            page=self.page,
            most_connections=self.max_connections,
            client_seconds=self.client_seconds,
        )


def run_with_front(
    flags: HttpFlags,
    source: Source,
    uds: Path | None,
    arguments: Sequence[str],
    drain_seconds: float,
    say: Callable[[str], None] | None,
) -> None:
    """Run a generator and a front until SIGTERM or Ctrl-C.

    Args:
        flags: what the command says of HTTP.
        source: the model.
        uds: where the generator listens; None for a folder that is gone afterwards.
        arguments: of ``compiled-llm`` for the generator, but for its socket.
        drain_seconds: how long requests may go on.
        say: tells the user something; None for nothing, and no log.

    Raises:
        ValueError: the flags are impossible.
        RuntimeError: the front cannot listen, or the generator has ended.
    """
    from compiled_llm.server.front.generator_process import GeneratorProcess
    from compiled_llm.server.front.serving import listen, serve, with_room

    with _socket_path(uds) as path:
        settings = flags.settings(source, drain_seconds)
        with listen(settings) as listening:
            if say is not None:
                _show_log()
                _introduce(settings, listening.getsockname()[1], uds, say)
            settings = with_room(settings)  # what it says goes to the log
            generator = GeneratorProcess(
                [*arguments, "--uds", str(path), "--leashed", "--drain-seconds", _DRAIN_SECONDS]
            )
            if (why := asyncio.run(serve(settings, path, listening, generator))) is not None:
                raise RuntimeError(f"serve: {why}")


def _introduce(settings: FrontSettings, port: int, uds: Path | None, say: Callable[[str], None]) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"serving {settings.names[0]} at {settings.scheme}://{host}:{port}/v1")
    if settings.page:
        say(f"to chat, open {settings.scheme}://{host if settings.has_name else 'localhost'}:{port}/ in a browser")
    if uds is not None:
        say(f"listening at {uds}, too")
    if not settings.is_local and settings.ssl_certfile is None:
        say("anybody on the way can read the API key and the requests: give --ssl-certfile and --ssl-keyfile")


def _show_log() -> None:
    """Write the server's log to stderr: a line a request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextmanager
def _socket_path(uds: Path | None) -> Iterator[Path]:
    if uds is not None:
        yield uds
        return
    from compiled_llm.server.generator.socket_folder import SocketFolder

    folder = SocketFolder()
    try:
        yield folder.socket
    finally:
        folder.remove()
