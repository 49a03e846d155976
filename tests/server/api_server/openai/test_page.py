"""The page at ``/``, and the bounds that a browser sets it."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from support.server.engine_processes import Loop
from support.server.running_servers import RunningServer, running_server

KEY = "a-key-of-sixteen-or-more"


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_runs_and_fetches_nothing_but_what_is_in_it(api_server: RunningServer) -> None:
    response = api_server.http.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    (style,) = re.findall(r"<style>(.*?)</style>", response.text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", response.text, re.DOTALL)
    assert (policy["style-src"], policy["script-src"]) == (hash_of(style), hash_of(script))
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"(src|href)=[\"'](?!data:)|@import|url\(|style=|\bon\w+=", response.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", script)


def test_it_shows_figures_that_there_are(api_server: RunningServer) -> None:
    api_server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    page, figures = api_server.http.get("/").text, api_server.http.get("/metrics").text
    names = set(re.findall(r"compiled_llm_\w+", page)) - {"compiled_llm_"}
    assert len(names) >= 8
    assert not [name for name in names if name not in figures]


def test_it_comes_without_a_key_and_says_nothing_of_the_model(engine_process: Loop) -> None:
    with running_server(engine_process.server._path, names=("a-secret-name",), api_keys=(KEY,)) as guarded:
        page = guarded.http.get("/")
        assert page.status_code == 200
        assert "a-secret-name" not in page.text
        assert guarded.http.get("/", headers={"host": "evil.example"}).status_code == 403
        assert guarded.http.get("/metrics").status_code == 401
        assert guarded.http.post("/", json={}).status_code == 405


def test_a_server_can_go_without_it(engine_process: Loop) -> None:
    with running_server(engine_process.server._path, page=False) as api_server:
        assert api_server.http.get("/").status_code == 404


def test_who_watches_a_server_does_not_fill_its_log(
    api_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "compiled_llm.server"):
        for path in ("/metrics", "/ready", "/health", "/version"):
            assert api_server.http.get(path).status_code == 200
        while " GET /version 200 " not in caplog.text:
            pass
    assert len(caplog.records) == 1
