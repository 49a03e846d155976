"""Fetches images from addresses of the hosts that the operator names, and of no machine of a private network."""

# The address that is checked is the one that is connected to: a name may mean another one a moment later. There is no
# proxy on the way, and no cookie.

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_AT_ONCE = 2**16
_TRANSLATED = IPv6Network("64:ff9b::/96")  # addresses of IPv4, of which the last four bytes are one


class TooLargeError(ValueError):
    """A file with more bytes than are read."""


class Bounds(NamedTuple):
    """What fetching may take: hosts that may be asked, bytes of a file, and seconds for all of it."""

    domains: frozenset[str]
    max_bytes: int
    seconds: float


def fetched(url: str, bounds: Bounds) -> bytes:
    """Return a file from an address, in a thread that may wait.

    Raises:
        TooLargeError: it has too many bytes.
        ValueError: a sentence without its subject: the address, or one that it leads to, is not allowed, or does not
            answer with a file.
    """
    deadline = time.monotonic() + bounds.seconds
    for _ in range(1 + _MAX_REDIRECTS):
        parts = _checked(url, bounds.domains)
        try:
            with _answer(parts, deadline) as answer:
                found = None if answer.status in _REDIRECTS else _read(answer, bounds.max_bytes)
                url = urljoin(url, answer.headers.get("Location", ""))
            if time.monotonic() >= deadline:  # a head that was cut looks whole
                raise TimeoutError
            if found is not None:
                return found
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise ValueError(f"is at an address that has not answered within {bounds.seconds:g} s") from error
            raise ValueError(f"cannot be fetched ({type(error).__name__})") from error
    raise ValueError(f"is at an address that leads to others more than {_MAX_REDIRECTS} times")


def _checked(url: str, domains: frozenset[str]) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("is at an address that is malformed") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("is at an address that is none of HTTP")
    if parts.username is not None:
        raise ValueError("is at an address with a name of a user, which is sent to nobody")
    if host.lower() not in domains:
        raise ValueError("is at an address, or leads to one, whose host --allowed-media-domains does not name")
    return parts


class _Connection(http.client.HTTPConnection):
    """A connection to a host's own address, with TLS if the scheme asks for it."""

    def __init__(self, parts: SplitResult, deadline: float) -> None:
        assert parts.hostname is not None, "it was checked"
        self._secure, self._deadline = parts.scheme == "https", deadline
        self.default_port = 443 if self._secure else 80
        super().__init__(parts.hostname, parts.port or self.default_port)

    def connect(self) -> None:
        self.sock = _connected((self.host, self.port), self._deadline)
        if self._secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


@contextmanager
def _answer(parts: SplitResult, deadline: float) -> Iterator[http.client.HTTPResponse]:
    connection = _Connection(parts, deadline)
    with _ended_at(deadline, lambda: connection.sock):
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "compiled-llm"})
            yield connection.getresponse()
        finally:
            connection.close()


def _connected(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connect to a host's first address that answers; ValueError if it is not one of the public Internet."""
    last: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        if not is_public(str(place[0])):
            raise ValueError("is at an address of a private network, or of this machine, which is not asked")
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            last = error
    raise last or OSError("there is no such host")


def is_public(address: str) -> bool:
    """Whether an address of IP is of the public Internet; one that carries another is as public as that."""
    found = ip_address(address.partition("%")[0])
    return all(
        one.is_global and not (one.is_multicast or one.is_reserved or one.is_unspecified)
        for one in _carried(found) or [found]
    )


def _carried(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """Return the addresses of IPv4 that one of IPv6 leads to."""
    if isinstance(address, IPv4Address):
        return []
    mapped = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED:
        mapped.append(IPv4Address(address.packed[-4:]))
    return [one for one in mapped if one is not None]


@contextmanager
def _ended_at(deadline: float, connection: Callable[[], socket.socket | None]) -> Iterator[None]:
    """Cut a connection at a time: an answer that comes byte by byte is never late for one of them."""

    def cut() -> None:
        if (found := connection()) is not None:
            with suppress(OSError, ValueError):
                found.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(deadline), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def _read(answer: http.client.HTTPResponse, max_bytes: int) -> bytes:
    if answer.status != 200:
        raise ValueError(f"is at an address that answers with status {answer.status}")
    if (answer.length or 0) > max_bytes:
        raise TooLargeError(f"has {answer.length:,} bytes, and at most {max_bytes:,} are read; make it smaller")
    content = bytearray()
    while piece := answer.read(_AT_ONCE):
        content += piece
        if len(content) > max_bytes:
            raise TooLargeError(f"has more than {max_bytes:,} bytes, which are all that is read; make it smaller")
    if answer.length:
        raise ValueError("is cut: its address has not sent all of it")
    return bytes(content)
