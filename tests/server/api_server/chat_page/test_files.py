"""What is sent for the page at ``/``: its own files and kept libraries, by their hashes, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import compiled_llm
from compiled_llm.server.chat_page import page
from support.imports import CHECKOUT
from support.server.engine_processes import Loop
from support.server.running_servers import RunningServer, running_server

MOST_BYTES = 600_000
VENDORED = Path(page.__file__).with_name("vendored")
MANIFEST: list[dict[str, str]] = json.loads((VENDORED / "manifest.json").read_text())
_SCRIPT = re.compile(r'<script (?:defer|type="module") src="(page/[\w.-]+)" integrity="(sha256-[\w+/=]+)"></script>')


def hash_of(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"


def policy_of(response: Any) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))


def test_the_page_runs_its_own_scripts_and_styles_alone(api_server: RunningServer) -> None:
    response = api_server.http.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy, scripts = policy_of(response), _SCRIPT.findall(response.text)
    (style,) = re.findall(r"<style>(.*?)</style>", response.text, re.DOTALL)
    assert response.text.count("<script") == len(scripts) == len(page.PATHS)
    assert policy["style-src"] == f"'{hash_of(style.encode())}'"
    assert policy["script-src"].split() == [f"'{integrity}'" for _, integrity in scripts]
    for path, integrity in scripts:
        assert hash_of(api_server.http.get(f"/{path}").content) == integrity
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "dompurify")
    assert not re.search(r"(src|href)=[\"'](?!data:|page/)|@import|url\(|style=|\bon\w+=", response.text)


def test_our_own_scripts_make_no_html_of_text() -> None:
    making = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write\(|eval\(|createPolicy")
    for file in page._OWN.glob("*.js"):
        assert not making.search(file.read_text())


def test_the_page_weighs_little_and_is_painted_before_anything_else_comes(api_server: RunningServer) -> None:
    first = api_server.http.get("/").content
    assert len(first) + sum(len(script.content) for script in page.scripts().values()) <= MOST_BYTES
    assert len(first) <= 30_000
    assert set(_SCRIPT.findall(first.decode())) == {
        (f"page/{name}", script.hash) for name, script in page.scripts().items()
    }  # all are deferred: none is waited for


def test_what_a_browser_has_is_not_sent_again(api_server: RunningServer) -> None:
    found = api_server.http.get("/page/chat.js")
    assert (found.headers["content-encoding"], found.headers["cache-control"]) == ("gzip", "no-cache")
    again = api_server.http.get("/page/chat.js", headers={"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = api_server.http.get("/page/chat.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == found.content
    assert api_server.http.get("/page/manifest.json").status_code == 404


def test_kept_libraries_are_those_that_the_manifest_names() -> None:
    for library in MANIFEST:
        for file, digest in (("file", "sha256"), ("licence_file", "licence_sha256")):
            assert hashlib.sha256((VENDORED / library[file]).read_bytes()).hexdigest() == library[digest], library
    named = {library[file] for library in MANIFEST for file in ("file", "licence_file")}
    assert {file.name for file in VENDORED.iterdir()} == {*named, "manifest.json"}
    assert set(page._LIBRARIES) == {library["file"] for library in MANIFEST}


@pytest.mark.slow
def test_the_wheel_has_all_files_and_licences(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    package = Path(compiled_llm.__file__).parent.parent
    for file in (*VENDORED.iterdir(), *page._OWN.iterdir()):
        assert str(file.relative_to(package)) in names
    folder = "licenses/compiled_llm/server/chat_page/vendored"
    for library in MANIFEST:
        assert any(name.endswith(f"{folder}/{library['licence_file']}") for name in names)
        assert library["licence"] in metadata


def test_the_page_shows_figures_that_there_are(api_server: RunningServer) -> None:
    api_server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    sent, figures = api_server.http.get("/").text, api_server.http.get("/metrics").text
    script = page._OWN.joinpath("figures.js").read_text()
    names = set(re.findall(r"compiled_llm_\w+", sent + script)) - {"compiled_llm_"}
    assert len(names) >= 8
    assert not [name for name in names if name not in figures]


def test_the_page_comes_without_a_key_says_nothing_of_the_model_and_can_be_left_out(engine_process: Loop) -> None:
    with running_server(
        engine_process.server._path, names=("a-secret-name",), api_keys=("a-key-of-sixteen-or-more",)
    ) as guarded:
        found = guarded.http.get("/")
        assert found.status_code == 200
        assert "a-secret-name" not in found.text
        assert {guarded.http.get(path).status_code for path in page.PATHS} == {200}
        assert guarded.http.get("/page/other.js").status_code == 401
        for path in ("/", "/page/chat.js"):
            assert guarded.http.get(path, headers={"host": "evil.example"}).status_code == 403
        assert guarded.http.get("/metrics").status_code == 401
        assert guarded.http.post("/", json={}).status_code == 405
    with running_server(engine_process.server._path, page=False) as api_server:
        assert api_server.http.get("/").status_code == 404
        assert api_server.http.get("/page/chat.js").status_code == 404
