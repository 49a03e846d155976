"""Who may use a server: by which name, from which page, with which key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from compiled_llm.server.front.settings import FrontSettings, keys_in
from support.fronts import RunningFront, fronting
from support.generators import Loop

KEYS = ("a-key-of-sixteen-or-more", "another-key-of-sixteen")
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(generator: Loop) -> Iterator[RunningFront]:
    options = {"api_keys": KEYS, "allowed_hosts": ("llm.example",), "cors_origins": ("https://page.example",)}
    with fronting(generator.generator._path, **options) as front:
        yield front


def ask(front: RunningFront, **headers: str) -> httpx.Response:
    return front.http.post("/v1/completions", json=BODY, headers=headers)


@pytest.mark.parametrize("key", ["", "Bearer", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", KEYS[0], "Bearer \u00fc"])
def test_without_a_key_nothing_is_answered(guarded: RunningFront, key: str) -> None:
    response = guarded.http.post("/v1/completions", json=BODY, headers={b"authorization": key.encode()} if key else {})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert not any(known in response.text for known in KEYS)
    assert guarded.http.get("/metrics").status_code == 401
    assert guarded.http.get("/openapi.json").status_code == 401
    assert guarded.http.get("/health").status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_with_a_key_it_is(guarded: RunningFront, key: str) -> None:
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
        ("[", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_served(guarded: RunningFront, host: str, status: int) -> None:
    assert ask(guarded, authorization=f"Bearer {KEYS[0]}", host=host).status_code == status


def test_pages_of_others_are_not_served(guarded: RunningFront, front: RunningFront) -> None:
    refused = ask(front, origin="https://evil.example")
    assert refused.status_code == 403
    assert refused.json()["error"]["message"].startswith("Origin: pages of other servers are not served")
    assert ask(front, origin="null").status_code == 403
    assert ask(front, origin=front.url).status_code == 200
    allowed = ask(guarded, origin="https://page.example", authorization=f"Bearer {KEYS[0]}")
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert guarded.http.options("/v1/completions", headers=preflight).status_code == 200
    preflight["origin"] = "https://evil.example"
    assert guarded.http.options("/v1/completions", headers=preflight).status_code == 400


def test_a_request_has_an_id_and_its_prompt_is_not_in_the_log(
    front: RunningFront, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "compiled_llm.server"):
        first, second = (
            front.http.post("/v1/completions?secret=1", json={**BODY, "prompt": "secret"}) for _ in range(2)
        )
        ids = [response.headers["x-request-id"] for response in (first, second)]
        assert ids[0] != ids[1]
        while not all(number in caplog.text for number in ids):  # a line is written once its answer has been sent
            time.sleep(0.001)
    assert "secret" not in caplog.text


def test_an_error_of_ours_shows_no_trace(
    front: RunningFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise KeyError("/home/me/secret")

    monkeypatch.setattr(front.front, "model_for", broken)
    response = ask(front)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "an error of the server; its log has it under the request's id"
    assert "home" not in response.text
    assert f"{response.headers['x-request-id']} has failed" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0: other machines could use the model; give --api-key-file"),
        ({"port": 70000}, "--port 70000: must be from 0 to 65535"),
        ({"ssl_certfile": Path("x")}, "--ssl-certfile and --ssl-keyfile: give both, or neither"),
    ],
)
def test_settings_that_are_not_safe_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrontSettings(names=("tiny",), **options)  # type: ignore[arg-type]


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(("", f" {KEYS[0]} ", KEYS[1], "")))
    assert keys_in(file) == KEYS
    for content, message in (("\n", "the file has no key"), ("short", "a key of 5 characters")):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            keys_in(file)
