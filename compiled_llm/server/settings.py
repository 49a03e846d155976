"""The settings of an API server."""

from __future__ import annotations

import math
import re
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiled_llm.server.defaults import (
    CLIENT_SECONDS,
    MAX_BODY_BYTES,
    MAX_BODY_BYTES_WITH_IMAGES,
    MAX_CONNECTIONS,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_UNSENT,
    MOST_BODY_BYTES,
    MOST_IMAGE_PIXELS,
)

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALL_ADDRESSES = ("", "0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class ApiServerSettings:
    """The place where an API server listens, whom it serves, and how much one may ask for.

    Attributes:
        names: that requests call the model by; the first one is in answers.
        port: to listen at; 0 for one that is free.
        api_keys: one of which requests have to bear; none for no check.
        allowed_hosts: further names in the ``Host`` header; ``*`` for any.
        cors_origins: of pages of other servers that may use this one from a browser.
        max_body_bytes: of a request; None for 8 MiB, and for 32 MiB if the model reads images.
        max_choices: answers that one request can ask for, prompts times ``n``.
        max_connections: of clients, at a time.
        max_unsent: tokens of a request that wait for a client that does not read, before it ends.
        stream_interval: tokens of an answer for each event of its stream; the first token and the last come at once.
        client_seconds: in which a client has to send a head, and then a body, and to take something of an answer.
        request_seconds: after which an answer ends with the tokens that it has; None for never.
        drain_seconds: how long requests may go on after the first signal.
        behind_proxy: whether clients are a proxy's, which names requests by ``X-Request-Id``.
        salts_caches: whether requests share prefixes in the cache only with their own key, or ``user``.
        escapes_special_tokens: whether special tokens in the texts of requests are plain text.
        page: whether there is a page to chat on.
        limit_mm_per_prompt: images that a request can have.
        max_image_bytes: of an image's file.
        max_image_pixels: of an image, which its header says.
        allowed_local_media_path: a folder whose files may be asked for as images; None for none.
        allowed_media_domains: hosts from which images may be fetched.
        otlp_traces_endpoint: where a span of each request is sent to; None for no spans.
        figures: a folder in which the API servers of a server count together; None for an API server alone.
        created: when the server has begun, in seconds since 1970.

    Raises:
        ValueError: others could reach the API server without a key, or a value is impossible.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_body_bytes: int | None = None
    max_choices: int = 128
    max_connections: int = MAX_CONNECTIONS
    max_unsent: int = MAX_UNSENT
    stream_interval: int = 1
    client_seconds: float = CLIENT_SECONDS
    request_seconds: float | None = None
    drain_seconds: float = 30.0
    salts_caches: bool = False
    escapes_special_tokens: bool = False
    behind_proxy: bool = False
    page: bool = True
    limit_mm_per_prompt: int = MAX_IMAGES
    max_image_bytes: int = MAX_IMAGE_BYTES
    max_image_pixels: int = MAX_IMAGE_PIXELS
    allowed_local_media_path: Path | None = None
    allowed_media_domains: tuple[str, ...] = ()
    otlp_traces_endpoint: str | None = None
    figures: Path | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.is_local and not self.api_keys:
            raise ValueError(
                f"--host {self.host}: other machines could use the model; give --api-key-file, or the environment "
                "variable COMPILED_LLM_API_KEY, or listen at 127.0.0.1"
            )
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port {self.port}: must be from 0 to 65535")
        if self.max_connections < 1:
            raise ValueError(f"--max-connections {self.max_connections}: must be at least 1")
        if not 1 <= self.stream_interval <= _LONGEST_INTERVAL:
            raise ValueError(f"--stream-interval {self.stream_interval}: must be from 1 to {_LONGEST_INTERVAL} tokens")
        if not 0 < self.client_seconds < math.inf:
            raise ValueError(f"--client-seconds {self.client_seconds:g}: must be more than 0")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile: give both, or neither")
        if wrong := [name for name in self.allowed_hosts if not _HOST.fullmatch(name)]:
            raise ValueError(f"--allowed-host {wrong[0]}: give a name or an address alone, or * for any")
        if wrong := [origin for origin in self.cors_origins if not _ORIGIN.fullmatch(origin)]:
            raise ValueError(f"--cors-origin {wrong[0]}: give it as browsers do, https://page.example, or * for any")

        self._check_images()
        if self.max_body_bytes is not None and not 1 <= self.max_body_bytes <= MOST_BODY_BYTES:
            raise ValueError(f"--max-body-bytes {self.max_body_bytes}: must be from 1 to {MOST_BODY_BYTES}")
        if (endpoint := self.otlp_traces_endpoint) is not None and not _ENDPOINT.fullmatch(endpoint):
            raise ValueError(
                f"--otlp-traces-endpoint {endpoint}: spans are sent by HTTP: give a URL as http://localhost:4318/v1/traces"
            )

    def _check_images(self) -> None:
        if self.max_image_bytes < 1:
            raise ValueError(f"--max-image-bytes {self.max_image_bytes}: must be at least 1")
        if not 1 <= self.max_image_pixels <= MOST_IMAGE_PIXELS:
            raise ValueError(f"--max-image-pixels {self.max_image_pixels}: must be from 1 to {MOST_IMAGE_PIXELS}")
        if (folder := self.allowed_local_media_path) is not None and not folder.is_dir():
            raise ValueError(f"--allowed-local-media-path {folder}: there is no such folder")
        if wrong := [name for name in self.allowed_media_domains if not _DOMAIN.fullmatch(name)]:
            raise ValueError(f"--allowed-media-domains {wrong[0]}: give the name of a host alone, as images.example")

    def body_bytes(self, reads_images: bool) -> int:
        """Return how many bytes the body of a request can have, by whether the model reads images."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return MAX_BODY_BYTES_WITH_IMAGES if reads_images else MAX_BODY_BYTES

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can reach the API server."""
        return self.host in LOOPBACK

    @property
    def has_name(self) -> bool:
        """Whether clients can use ``host``, which may be all addresses of the machine."""
        return self.host not in _ALL_ADDRESSES

    @property
    def hosts(self) -> frozenset[str]:
        """Names that the ``Host`` header may have."""
        own = (self.host.lower(),) if self.has_name else ()
        return frozenset((*LOOPBACK, *own, *(name.lower() for name in self.allowed_hosts)))

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


_ATTRIBUTES = {
    "served_model_name": "names",
    "allowed_host": "allowed_hosts",
    "cors_origin": "cors_origins",
    "salt_caches": "salts_caches",
    "escape_special_tokens": "escapes_special_tokens",
}
"""Options whose attribute has another name."""


def settings_of(options: Mapping[str, Any], name: str, **others: Any) -> ApiServerSettings:
    """Return the settings that options of ``compiled-llm serve`` ask for.

    Raises:
        ValueError: as ``ApiServerSettings``, or the file of keys has none, or short ones.
    """
    given = {_ATTRIBUTES.get(option, option): value for option, value in options.items() if value is not None}
    if (file := given.pop("api_key_file", None)) is not None:
        given["api_keys"] = keys_in(Path(file))
    for several in ("names", "allowed_hosts", "cors_origins", "allowed_media_domains"):
        value = given.get(several, ())
        given[several] = (value,) if isinstance(value, str) else tuple(value)
    if (folder := given.get("allowed_local_media_path")) is not None:
        given["allowed_local_media_path"] = Path(folder)
    given["allowed_media_domains"] = tuple(map(str.lower, given["allowed_media_domains"]))
    return ApiServerSettings(**{**given, "names": given["names"] or (name,)}, **others)


def keys_in(file: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line; ValueError if there are none, or one is too short."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {file}: cannot be read: {_reason(error)}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ValueError(f"--api-key-file {file}: the file has no key; write one a line")
    return checked_keys(keys, f"--api-key-file {file}")


def checked_keys(keys: tuple[str, ...], source: str) -> tuple[str, ...]:
    """Return keys that come from ``source``; ValueError if one is too short."""
    if short := [key for key in keys if len(key) < _SHORTEST_KEY or not key.isascii()]:
        raise ValueError(
            f"{source}: a key of {len(short[0])} characters; keys are of ASCII, {_SHORTEST_KEY} or "
            'more: python -c "import secrets; print(secrets.token_urlsafe())" makes one'
        )
    return keys


def readers_of(file: Path) -> str | None:
    """Return a warning that other users may read a file with secrets; None if they cannot, or it is unknown."""
    with suppress(OSError):
        mode = file.stat().st_mode & 0o777
        if mode & 0o044:
            whom = "all users" if mode & 0o004 else "its group"
            return f"--api-key-file {file}: {whom} of this machine may read the keys (mode {mode:o}): chmod 600"
    return None


def check_certificate(certfile: Path, keyfile: Path) -> None:
    """Check that a certificate can be used with its key, which has no password; ValueError if it cannot."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: b"")
    except OSError as error:  # ssl's own errors are some
        raise ValueError(
            f"--ssl-certfile {certfile} --ssl-keyfile {keyfile}: cannot be used: {_reason(error)}; give a PEM file "
            "with the certificate, and one with its key, without a password"
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


_SHORTEST_KEY = 16
_LONGEST_INTERVAL = 1024
_HOST = re.compile(r"\*|[\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*")
_DOMAIN = re.compile(r"[a-z0-9.-]+|[0-9a-f]*:[0-9a-f:.]+", re.ASCII)
_ENDPOINT = re.compile(r"https?://[^/\s]+/\S*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
