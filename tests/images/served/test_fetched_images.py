"""Images at addresses: a server of this machine stands for one of the Internet, and leads elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from support.huggingface.word_processor import as_file, painted

RED = as_file(painted(1))


class Pages(BaseHTTPRequestHandler):
    """Images, and ways that lead away from them."""

    def do_GET(self) -> None:
        name, _, rest = self.path[1:].partition("?")[0].partition("/")
        if name == "to":
            self._answer(302, b"", Location=rest.replace("PORT", str(self.server.server_port)))  # type: ignore[attr-defined]
        elif name == "slow":
            self._drip()
        elif name == "cut":
            self._answer(200, RED, length=len(RED) + 9)
        elif name == "long":
            self._answer(200, RED, length=2**40)
        elif name == "endless":
            self._answer(200, bytes(2**16), length=None)
        else:
            self._answer(200 if name == "red.png" else 404, RED)

    def _answer(self, status: int, body: bytes, length: int | None = -1, **headers: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def _drip(self) -> None:
        with suppress(OSError):  # it is cut
            for byte in b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500:
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, to which this machine is public until a test says otherwise."""
    from compiled_llm.server.images import fetching  # a part that can be taken out

    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    return fetching


def bounds(fetching: Any, **others: Any) -> Any:
    given = {"domains": frozenset(("127.0.0.1", "localhost")), "max_bytes": 2**15, "seconds": 5.0, **others}
    return fetching.Bounds(**given)


def test_a_image_is_fetched_and_led_to(fetching, site):
    for path in ("/red.png", "/red.png?a=b#c", "/to//red.png", "/to/http://localhost:PORT/red.png"):
        assert fetching.fetched(site + path, bounds(fetching)) == RED


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none.png", "answers with status 404"),
        ("/to/http://other.example/red.png", "does not name"),
        ("/to/http://169.254.169.254/", "does not name"),
        ("/to/file:///etc/passwd", "none of HTTP"),
        ("/to/http://127.0.0.1@other.example/", "user"),
        ("/to//to//to//to//to//red.png", "more than 3 times"),
        ("/cut", "IncompleteRead|cut"),
        ("/long", "bytes"),
        ("/endless", "bytes"),
    ],
)
def test_what_an_address_leads_to_is_bounded(fetching, site, path, words):
    with pytest.raises(ValueError, match=words):
        fetching.fetched(site + path, bounds(fetching))


def test_an_answer_that_drips_is_cut_at_its_time(fetching, site):
    with pytest.raises(ValueError, match=r"has not answered within 0\.3 s"):
        fetching.fetched(f"{site}/slow", bounds(fetching, seconds=0.3))


def test_a_redirect_to_this_machine_is_refused_where_it_connects(fetching, site, monkeypatch):
    from compiled_llm.server.images.fetching import is_public

    seen = iter((True,))
    monkeypatch.setattr(fetching, "is_public", lambda address: next(seen, False))
    with pytest.raises(ValueError, match="private network"):
        fetching.fetched(f"{site}/to/http://localhost:PORT/red.png", bounds(fetching))
    assert is_public is not fetching.is_public


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *[(address, True) for address in ("1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1")],
        *[(address, False) for address in ("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254")],
        *[(address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")],
        *[(address, False) for address in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1")],
        *[(address, False) for address in ("64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:10.0.0.1", "2001:db8::1")],
    ],
)
def test_which_addresses_are_public(address, public):
    from compiled_llm.server.images.fetching import is_public

    assert is_public(address) is public
