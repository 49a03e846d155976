"""HTTPS: with a certificate it answers, plain HTTP is turned away, and a key that goes out in the open is warned of."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve.http import HttpFlags, _introduce
from compiled_llm.server.settings import ApiServerSettings, check_certificate
from support.server.certificates import signed_by_itself
from support.server.engine_processes import PATIENCE, Loop
from support.server.running_servers import RunningServer, running_server

KEY = "a-key-of-sixteen-or-more"
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return signed_by_itself(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(engine_process: Loop, files: tuple[Path, Path]) -> Iterator[RunningServer]:
    certificate, key = files
    options = {"ssl_certfile": certificate, "ssl_keyfile": key, "api_keys": (KEY,)}
    with running_server(engine_process.server._path, **options) as api_server:
        yield api_server


@pytest.fixture
def https(secure: RunningServer, files: tuple[Path, Path]) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(files[0]))
    headers = {"authorization": f"Bearer {KEY}"}
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


def test_a_key_that_goes_out_in_the_open_is_warned_of(files: tuple[Path, Path]) -> None:
    def said(**options: object) -> bool:
        lines: list[str] = []
        _introduce(ApiServerSettings(names=("tiny",), **options), 8000, None, lines.append)  # type: ignore[arg-type]
        return any("anybody on the way can read the API key and the requests" in line for line in lines)

    beyond = {"host": "0.0.0.0", "api_keys": (KEY,)}
    assert said(**beyond)
    assert not said(**beyond, ssl_certfile=files[0], ssl_keyfile=files[1])
    assert not said(api_keys=(KEY,))
