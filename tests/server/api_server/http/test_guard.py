"""A server is used by its names, by its pages, and with a key; with a certificate it answers HTTPS alone."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve.http import HttpFlags, _warn
from compiled_llm.server import guard
from compiled_llm.server.guard import Guard
from compiled_llm.server.openai.metrics import ApiServerMetrics
from compiled_llm.server.settings import ApiServerSettings, check_certificate, keys_in, readers_of
from support.server.certificates import signed_by_itself
from support.server.engine_processes import PATIENCE, Loop
from support.server.running_servers import RunningServer, running_server

KEYS = ("a-key-of-sixteen-or-more", "another-key-of-sixteen")
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(engine_process: Loop) -> Iterator[RunningServer]:
    options = {"api_keys": KEYS, "allowed_hosts": ("llm.example",), "cors_origins": ("https://page.example",)}
    with running_server(engine_process.server._path, **options) as api_server:
        yield api_server


def ask(api_server: RunningServer, **headers: str) -> httpx.Response:
    return api_server.http.post("/v1/completions", json=BODY, headers=headers)


@pytest.mark.parametrize("key", ["", "Bearer", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", KEYS[0], "Bearer \u00fc"])
def test_without_a_key_nothing_is_answered(guarded: RunningServer, key: str) -> None:
    response = guarded.http.post("/v1/completions", json=BODY, headers={b"authorization": key.encode()} if key else {})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert not any(known in response.text for known in KEYS)


def test_each_key_opens_all_and_health_needs_none(guarded: RunningServer) -> None:
    for path, status in (("/metrics", 401), ("/openapi.json", 401), ("/health", 200)):
        assert guarded.http.get(path).status_code == status
    for key in KEYS:
        assert ask(guarded, authorization=f"Bearer {key}").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("llm.example:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("127.0.0.1.nip.io", 403),
        ("localhost.", 403),
        ("[::ffff:127.0.0.1]", 403),
        ("[::1]evil.example", 403),
        ("0.0.0.0", 403),
        ("2130706433", 403),
        ("localhost:80:80", 403),
        ("localhost:" + "80" * 200, 403),
        ("evil.example, localhost", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_served(guarded: RunningServer, host: str, status: int) -> None:
    assert ask(guarded, authorization=f"Bearer {KEYS[0]}", host=host).status_code == status


def test_two_hosts_are_refused(api_server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", api_server.port)) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        received = peer.recv(2**16)
    assert received.startswith(b"HTTP/1.1 400 ")


def test_pages_of_others_are_not_served(guarded: RunningServer, api_server: RunningServer) -> None:
    refused = ask(api_server, origin="https://evil.example")
    assert refused.status_code == 403
    assert refused.json()["error"]["message"].startswith("Origin: pages of other servers are not served")
    port = api_server.port
    others = (f"http://localhost.evil.example:{port}", f"http://a@localhost:{port}")
    for origin in ("null", "", "file://", "http://localhost:1", *others):
        assert ask(api_server, origin=origin, host=f"localhost:{port}").status_code == 403, origin
    assert ask(api_server, origin=api_server.url).status_code == 200
    allowed = ask(guarded, origin="https://page.example", authorization=f"Bearer {KEYS[0]}")
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert guarded.http.options("/v1/completions", headers=preflight).status_code == 200
    preflight["origin"] = "https://evil.example"
    assert guarded.http.options("/v1/completions", headers=preflight).status_code == 400


def test_names_of_ipv6_are_served(engine_process: Loop) -> None:
    with running_server(engine_process.server._path, host="::1") as api_server:
        url = f"http://[::1]:{api_server.port}"
        for headers in ({}, {"origin": url}):
            assert httpx.post(f"{url}/v1/completions", json=BODY, headers=headers).status_code == 200


def test_all_keys_are_compared_each_time(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time would say how many of them begin like the one that is given, or which one it is."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    for key in (*(f"Bearer {known}" for known in KEYS), "Bearer wrong", "Bearer"):
        compared.clear()
        ask(guarded, authorization=key)
        assert len(compared) == len(KEYS)
        assert {len(side) for pair in compared for side in pair} == {32}  # digests: of one length


def test_requests_have_ids_and_no_prompt_in_the_log(
    api_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "compiled_llm.server"):
        first, second = (
            api_server.http.post("/v1/completions?secret=1", json={**BODY, "prompt": "secret"}) for _ in range(2)
        )
        ids = [response.headers["x-request-id"] for response in (first, second)]
        assert ids[0] != ids[1]
        while not all(number in caplog.text for number in ids):  # a line is written once its answer has been sent
            time.sleep(0.001)
    assert "secret" not in caplog.text


def test_an_error_of_ours_shows_no_trace(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_server.api_server, "model_for", Mock(side_effect=KeyError("/home/me/secret")))
    response = ask(api_server)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "an error of the server; its log has it under the request's id"
    assert "home" not in response.text
    assert f"{response.headers['x-request-id']} has failed" in caplog.text


def answer_of_guard(client: tuple[str, int] | None, **options: Any) -> tuple[int, dict[str, str]]:
    """What a guard before an empty application sends to a client."""
    sent: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("it is served")(scope, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"x-request-id", b"named"), (b"authorization", f"Bearer {KEYS[0]}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/version", "headers": headers, "client": client}
    settings = ApiServerSettings(names=("tiny",), **options)
    guard = Guard(application, settings, ApiServerMetrics(), lambda: settings.body_bytes(False))
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("client", "status"),
    [(("127.0.0.1", 1), 200), (("::1", 1), 200), (None, 200), (("192.0.2.7", 1), 403), (("elsewhere", 1), 403)],
)
def test_only_this_machine_is_served_without_a_key(client: tuple[str, int] | None, status: int) -> None:
    assert answer_of_guard(client)[0] == status
    assert answer_of_guard(client, api_keys=KEYS)[0] == 200


def test_the_names_of_a_proxy_are_kept_and_those_of_clients_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "compiled_llm.server"):
        assert answer_of_guard(None)[1]["x-request-id"].startswith("req-")
        assert "named" not in caplog.text
        assert "x-request-id" not in answer_of_guard(None, behind_proxy=True)[1]  # the proxy sends it
        assert "named GET" in caplog.text


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert readers_of(file) is None
    file.write_text("\n".join(("", f" {KEYS[0]} ", KEYS[1], "")))
    assert keys_in(file) == KEYS
    for content, message in (
        (b"\n", "the file has no key"),
        (b"short", "a key of 5 characters"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
        (None, "cannot be read: No such file or directory"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            keys_in(file)


# ---- HTTPS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return signed_by_itself(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(engine_process: Loop, files: tuple[Path, Path]) -> Iterator[RunningServer]:
    certificate, key = files
    options = {"ssl_certfile": certificate, "ssl_keyfile": key, "api_keys": KEYS}
    with running_server(engine_process.server._path, **options) as api_server:
        yield api_server


@pytest.fixture
def https(secure: RunningServer, files: tuple[Path, Path]) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(files[0]))
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    url = f"https://localhost:{secure.port}"
    with httpx.Client(base_url=url, verify=context, headers=headers, timeout=PATIENCE) as client:
        yield client


def test_who_knows_the_certificate_is_answered(https: httpx.Client) -> None:
    assert https.post("/v1/completions", json=BODY).status_code == 200
    with https.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
    assert https.get("/ready", headers={"origin": str(https.base_url)}).status_code == 200


def test_who_does_not_believe_it_sends_nothing(secure: RunningServer) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.post(f"https://localhost:{secure.port}/v1/completions", json=BODY)


@pytest.mark.parametrize(
    "sent", [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b""]
)
def test_plain_http_is_turned_away(https: httpx.Client, secure: RunningServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=PATIENCE) as peer:
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert b"HTTP/" not in peer.recv(2**16)
    assert https.post("/v1/completions", json=BODY).status_code == 200


def test_old_versions_of_tls_are_refused(secure: RunningServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", secure.port)) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain)


def test_a_certificate_that_cannot_be_shown_is_refused_at_once(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = files
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "secret").mkdir()
    _, secret = signed_by_itself(tmp_path / "secret", "-passout", "pass:word")
    check_certificate(certificate, key)
    wrong = [(certificate, tmp_path / "missing"), (tmp_path / "text", key), (key, certificate), (certificate, secret)]
    for pair in wrong:
        flags = HttpFlags(ssl_certfile=pair[0], ssl_keyfile=pair[1])
        with pytest.raises(ValueError, match=r"--ssl-certfile .* --ssl-keyfile .*: cannot be used: .*; give a PEM"):
            flags.settings(Source("demo", "demo"), 1.0)


def test_a_key_that_goes_out_in_the_open_is_warned_of(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def said(**options: object) -> bool:
        caplog.clear()
        _warn(HttpFlags(), ApiServerSettings(names=("tiny",), **options))  # type: ignore[arg-type]
        return "anybody on the way can read the API key and the requests" in caplog.text

    beyond = {"host": "0.0.0.0", "api_keys": KEYS}
    assert said(**beyond)
    assert not said(**beyond, ssl_certfile=files[0], ssl_keyfile=files[1])
    assert not said(api_keys=KEYS)
