"""What is served beside answers: tokens, states, figures."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx

import compiled_llm
from compiled_llm.server.serving import listen
from compiled_llm.server.settings import ApiServerSettings
from support.docs.pages import DOCS
from support.server.engine_processes import Loop
from support.server.running_servers import RunningServer, chat_tokenizer, running_server


def post(api_server: RunningServer, path: str, body: object) -> httpx.Response:
    return api_server.http.post(path, json=body)


def test_texts_become_tokens_and_tokens_texts(api_server: RunningServer) -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer("the quick fox")["input_ids"]
    assert post(api_server, "/tokenize", {"prompt": "the quick fox"}).json()["tokens"] == ids
    assert post(api_server, "/detokenize", {"tokens": ids}).json() == {"prompt": "the quick fox"}
    messages = [{"role": "user", "content": "hi"}]
    found = post(api_server, "/tokenize", {"messages": messages}).json()
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found["tokens"] == expected
    assert found["count"] == len(expected)


def test_states_and_figures(api_server: RunningServer) -> None:
    assert api_server.http.get("/health").json() == {"status": "ok"}
    assert api_server.http.get("/ready").json() == {"ready": True, "doing": "ready"}
    assert api_server.http.get("/version").json() == {"version": compiled_llm.__version__}
    assert post(api_server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    text = api_server.http.get("/metrics").text
    for figure in ("compiled_llm_running 0.0", "compiled_llm_steps_total", 'compiled_llm_pages{state="free"}'):
        assert figure in text
    assert 'compiled_llm_http_requests_total{path="/ready",status="200"}' in text


def test_every_figure_is_explained(api_server: RunningServer) -> None:
    page = (DOCS / "how-to" / "http.md").read_text()
    text = api_server.http.get("/metrics").text
    names = {name for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE) if not name.endswith("_created")}
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in page]


def test_before_the_model_is_ready_requests_hear_what_is_done(path: Path) -> None:
    loop = Loop(path)
    loop.server.report("loading weights")
    with running_server(loop.server._path, wait=False) as api_server:
        while api_server.http.get("/ready").json()["doing"] != "loading weights":
            pass
        assert api_server.http.get("/ready").status_code == 503
        assert api_server.http.get("/health").status_code == 200
        refused = post(api_server, "/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"] == "the model is not ready: loading weights"
        assert "compiled_llm_steps" not in api_server.http.get("/metrics").text
    loop.close()


def test_small_pieces_do_not_wait_for_others() -> None:
    """Or each token would wait 40 ms for the acknowledgement of the one before."""
    settings = ApiServerSettings(names=("tiny",), port=0)
    with listen(settings) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
