"""`compiled-llm serve` over HTTP: an API server in this process, or several in their own, and an engine process."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_llm.commands.early_checks import check_package, has_driver
from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.options.groups import OptionGroup
from compiled_llm.commands.serve import options
from compiled_llm.commands.serve.log import logger, show_log
from compiled_llm.server.defaults import CLIENT_SECONDS, MAX_CONNECTIONS, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGES

if TYPE_CHECKING:  # imports FastAPI, which an engine process does not need
    from compiled_llm.server.engine_process.socket_folder import SocketFolder
    from compiled_llm.server.serving import Serving
    from compiled_llm.server.settings import ApiServerSettings

_MAX_API_SERVERS = 64
_DRAIN_SECONDS = "1"  # of the engine process, which is told to end when all answers have ended


@dataclass(frozen=True)
class HttpFlags(OptionGroup):
    """The command's options of HTTP."""

    host: options.Host = None
    port: options.Port = None
    served_model_name: options.ServedModelName = None
    api_key_file: options.ApiKeyFile = None
    allowed_host: options.AllowedHost = None
    cors_origin: options.CorsOrigin = None
    ssl_certfile: options.SslCertfile = None
    ssl_keyfile: options.SslKeyfile = None
    request_seconds: options.RequestSeconds = None
    salt_caches: options.SaltCaches = False
    escape_special_tokens: options.EscapeSpecialTokens = False
    page: options.Page = True
    max_connections: options.MaxConnections = MAX_CONNECTIONS
    client_seconds: options.ClientSeconds = CLIENT_SECONDS
    stream_interval: options.StreamInterval = 1
    allowed_local_media_path: options.AllowedLocalMediaPath = None
    allowed_media_domains: options.AllowedMediaDomains = None
    max_body_bytes: options.MaxBodyBytes = None
    max_image_bytes: options.MaxImageBytes = MAX_IMAGE_BYTES
    max_image_pixels: options.MaxImagePixels = MAX_IMAGE_PIXELS
    api_server_count: options.ApiServerCount = None
    otlp_traces_endpoint: options.OtlpTracesEndpoint = None

    @property
    def given(self) -> bool:
        return self != HttpFlags()

    def settings(self, source: Source, drain_seconds: float, images: int = MAX_IMAGES) -> ApiServerSettings:
        """Return the settings of the API server; ValueError if they contradict each other, or if a file is unfit."""
        from compiled_llm.server.settings import check_certificate, settings_of

        names = ("served_model_name", "allowed_host", "cors_origin", "allowed_media_domains")
        several = {name: getattr(self, name) or () for name in names}
        flags = {**vars(self), **several, "host": self.host or None}
        count = flags.pop("api_server_count")
        if count is not None and not 1 <= count <= _MAX_API_SERVERS:
            raise ValueError(f"--api-server-count {count}: must be from 1 to {_MAX_API_SERVERS}")
        if self.otlp_traces_endpoint is not None:
            check_package("opentelemetry.exporter.otlp.proto.http", "otel")
        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            check_certificate(self.ssl_certfile, self.ssl_keyfile)
        others = {"drain_seconds": drain_seconds, "limit_mm_per_prompt": images}
        return settings_of(flags, source.public_name, **others, **self._keys())

    def _keys(self) -> dict[str, tuple[str, ...]]:
        """Return the key of the environment, if there is one; ValueError if it is unfit, or beside a file of keys."""
        from compiled_llm.server.settings import checked_keys

        if not (key := os.environ.get("COMPILED_LLM_API_KEY")):
            return {}
        if self.api_key_file is not None:
            raise ValueError(
                f"--api-key-file {self.api_key_file}: the environment variable COMPILED_LLM_API_KEY has a key, too; "
                "keys come from one place: unset it, or leave the file out"
            )
        return {"api_keys": checked_keys((key,), "COMPILED_LLM_API_KEY")}


def usual_count(device: str) -> int:
    """Return how many API servers a server has unless it is told: one where the model is slower than an API server."""
    # On a CPU the model needs all cores, and is; one API server writes some 40,000 tokens a second, fewer than a small
    # model makes on a GPU. More than four were not needed by any, and each takes 150 MB.
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" or cores < 4 or not has_driver():
        return 1
    return min(max(cores // 4, 2), 4)


def run_with_api_server(
    flags: HttpFlags,
    source: Source,
    uds: Path | None,
    arguments: Sequence[str],
    drain_seconds: float,
    log: tuple[str, str] | None,
    images: int = MAX_IMAGES,
) -> None:
    """Run an engine process and its API servers until SIGTERM or Ctrl-C.

    Raises:
        ValueError: the flags are impossible.
        RuntimeError: the server cannot listen, or the engine process has ended.
    """
    from compiled_llm.server.engine_process.starter import EngineProcess
    from compiled_llm.server.serving import listen, serve

    settings = flags.settings(source, drain_seconds, images)
    with _own_folder() as folder, listen(settings) as listening:
        path = folder.socket if uds is None else uds
        if log is not None:
            show_log(*log)
            _introduce(settings, listening.getsockname()[1], uds)
            _warn(flags, settings)
        serving = _serving(settings, flags.api_server_count or 1, listening, path, folder.figures, log)
        engine_process = EngineProcess([*arguments, "--uds", str(path), "--leashed", "--drain-seconds", _DRAIN_SECONDS])
        if (why := asyncio.run(serve(serving, engine_process))) is not None:
            raise RuntimeError(f"serve: {why}")


def _serving(
    settings: ApiServerSettings,
    count: int,
    listening: socket.socket,
    path: Path,
    figures: Path,
    log: tuple[str, str] | None,
) -> Serving:
    """Return an API server in this process, or several processes that share the connections."""
    from compiled_llm.server.serving import with_room

    if count == 1:
        from compiled_llm.server.http_server import ListeningServer

        return ListeningServer(with_room(settings), path, listening)
    from compiled_llm.server.processes.handover import Start
    from compiled_llm.server.processes.workers import ApiServers

    share = replace(settings, max_connections=math.ceil(settings.max_connections / count), figures=figures)
    return ApiServers(Start(with_room(share), path, log), listening, count)


def _introduce(settings: ApiServerSettings, port: int, uds: Path | None) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("compiled_llm: serving %s at %s://%s:%d/v1", settings.names[0], settings.scheme, host, port)
    if settings.page:
        named = host if settings.has_name else "localhost"
        logger.info("compiled_llm: to chat, open %s://%s:%d/ in a browser", settings.scheme, named, port)
    if uds is not None:
        logger.info("compiled_llm: listening at %s, too", uds)


def _warn(flags: HttpFlags, settings: ApiServerSettings) -> None:
    from compiled_llm.server.settings import readers_of

    if not settings.is_local and settings.ssl_certfile is None:
        logger.warning(
            "compiled_llm: anybody on the way can read the API key and the requests: give --ssl-certfile and "
            "--ssl-keyfile"
        )
    if flags.api_key_file is not None and (warning := readers_of(flags.api_key_file)) is not None:
        logger.warning("compiled_llm: %s", warning)


@contextmanager
def _own_folder() -> Iterator[SocketFolder]:
    from compiled_llm.server.engine_process.socket_folder import SocketFolder

    folder = SocketFolder()
    try:
        yield folder
    finally:
        folder.remove()
