"""What is served beside answers: tokens, states, figures."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx
import pytest

import compiled_llm
from compiled_llm.server.serving import listen
from compiled_llm.server.settings import FrontSettings
from support.docs.pages import DOCS
from support.server.fronts import RunningFront, chat_tokenizer, fronting
from support.server.generators import Loop


def post(front: RunningFront, path: str, body: object) -> httpx.Response:
    return front.http.post(path, json=body)


def test_texts_become_tokens_and_tokens_texts(front: RunningFront) -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer("the quick fox")["input_ids"]
    assert post(front, "/tokenize", {"prompt": "the quick fox"}).json()["tokens"] == ids
    assert post(front, "/detokenize", {"tokens": ids}).json() == {"prompt": "the quick fox"}
    messages = [{"role": "user", "content": "hi"}]
    found = post(front, "/tokenize", {"messages": messages}).json()
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found["tokens"] == expected
    assert found["count"] == len(expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [99999]}),
    ],
)
def test_what_is_neither_is_refused(front: RunningFront, path: str, body: object) -> None:
    response = post(front, path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("prompt", "tokens")


def test_states_and_figures(front: RunningFront) -> None:
    assert front.http.get("/health").json() == {"status": "ok"}
    assert front.http.get("/ready").json() == {"ready": True, "doing": "ready"}
    assert front.http.get("/version").json() == {"version": compiled_llm.__version__}
    assert post(front, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    text = front.http.get("/metrics").text
    for figure in ("compiled_llm_running 0.0", "compiled_llm_steps_total", 'compiled_llm_pages{state="free"}'):
        assert figure in text
    assert 'compiled_llm_http_requests_total{path="/ready",status="200"}' in text


def test_every_figure_is_explained(front: RunningFront) -> None:
    page = (DOCS / "how-to" / "http.md").read_text()
    text = front.http.get("/metrics").text
    names = {name for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE) if not name.endswith("_created")}
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in page]


def test_before_the_model_is_ready_requests_hear_what_is_done(path: Path) -> None:
    loop = Loop(path)
    loop.generator.report("loading weights")
    with fronting(loop.generator._path, wait=False) as front:
        while front.http.get("/ready").json()["doing"] != "loading weights":
            pass
        assert front.http.get("/ready").status_code == 503
        assert front.http.get("/health").status_code == 200
        refused = post(front, "/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"] == "the model is not ready: loading weights"
        assert "compiled_llm_steps" not in front.http.get("/metrics").text
    loop.close()


def test_small_pieces_do_not_wait_for_others() -> None:
    """Or each token would wait 40 ms for the acknowledgement of the one before."""
    settings = FrontSettings(names=("tiny",), port=0)
    with listen(settings) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
