"""What is served beside answers: tokens, states, figures, and the OpenAPI document."""

from __future__ import annotations

import math
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import compiled_llm
from compiled_llm.commands.app import app
from compiled_llm.commands.doctor import checks
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.server.serving import listen
from compiled_llm.server.settings import ApiServerSettings
from support.docs.pages import DOCS
from support.server.engine_processes import PATIENCE, Loop, until
from support.server.running_servers import RunningServer, chat_tokenizer, running_server


def test_texts_become_tokens_and_tokens_texts(api_server: RunningServer) -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer("the quick fox")["input_ids"]
    assert api_server.post("/tokenize", prompt="the quick fox")["tokens"] == ids
    assert api_server.post("/detokenize", tokens=ids) == {"prompt": "the quick fox"}
    messages = [{"role": "user", "content": "hi"}]
    found = api_server.post("/tokenize", messages=messages)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found["tokens"] == expected
    assert found["count"] == len(expected)


def test_states_and_figures(api_server: RunningServer) -> None:
    assert api_server.http.get("/health").json() == {"status": "ok"}
    head = api_server.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert api_server.http.get("/ready").json() == {"ready": True, "doing": "ready"}
    assert api_server.http.get("/version").json() == {"version": compiled_llm.__version__}
    api_server.post("/v1/completions", prompt="a", max_tokens=1)
    text = api_server.http.get("/metrics").text
    for figure in ("compiled_llm_running 0.0", "compiled_llm_steps_total", 'compiled_llm_pages{state="free"}'):
        assert figure in text
    assert "compiled_llm_uncompiled 0.0" in text
    assert 'compiled_llm_http_requests_total{path="/ready",status="200"}' in text


def test_latencies_are_histograms_up_to_ten_minutes(api_server: RunningServer) -> None:
    """Which Prometheus adds up over servers, and takes percentiles of over any time."""

    def counted() -> dict[str, float]:
        lines = (line.rpartition(" ") for line in api_server.http.get("/metrics").text.splitlines() if line[0] != "#")
        return {name: float(value) for name, _, value in lines}

    before = counted()
    api_server.post("/v1/completions", prompt="a", max_tokens=7, n=2, ignore_eos=True)
    of_path = 'path="/v1/completions"'
    until(lambda: counted()[f"compiled_llm_http_seconds_count{{{of_path}}}"] >= 1)
    after = counted()
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("request_queue_time_seconds", 2),
        ("inter_token_latency_seconds", 12),
    ):
        for suffix in ("count", 'bucket{le="600.0"}', 'bucket{le="+Inf"}'):
            assert after[f"compiled_llm_{name}_{suffix}"] - before[f"compiled_llm_{name}_{suffix}"] == count
        assert after[f"compiled_llm_{name}_sum"] > before[f"compiled_llm_{name}_sum"]
        bounds = [float(found) for found in re.findall(rf'compiled_llm_{name}_bucket{{le="([^"]+)"}}', str(after))]
        assert bounds == [*sorted(bounds[:-1]), math.inf]
        assert bounds[-2] == 600
    assert f'compiled_llm_http_seconds_bucket{{le="600.0",{of_path}}}' in after
    assert not [name for name in after if "quantile" in name]


def test_a_server_says_that_it_answers_uncompiled_and_when_that_ends(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ready() -> dict[str, Any]:
        found: dict[str, Any] = api_server.http.get("/ready").json()
        return found

    plain = {"ready": True, "doing": "ready"}
    with caplog.at_level("INFO", "compiled_llm.server"), monkeypatch.context() as patch:
        for why, said in (
            ("compiling", "answers run uncompiled, until they are compiled in the background"),
            ("failed", "answers stay uncompiled: compiling has failed"),
        ):
            patch.setattr(ModelRunner, "uncompiled", why)
            until(lambda why=why: ready() == {**plain, "uncompiled": why})
            assert "compiled_llm_uncompiled 1.0" in api_server.http.get("/metrics").text
            assert said in caplog.text
        patch.undo()
        until(lambda: ready() == plain)
        assert "new answers run compiled from now on" in caplog.text
    assert "compiled_llm_uncompiled 0.0" in api_server.http.get("/metrics").text


def test_every_figure_is_explained(api_server: RunningServer) -> None:
    page = (DOCS / "how-to" / "http.md").read_text()
    text = api_server.http.get("/metrics").text
    names = {name for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE) if not name.endswith("_created")}
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in page]


def test_a_checkout_that_was_not_installed_is_served(engine_process: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    find = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name == "compiled-llm":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)
    with running_server(engine_process.server._path) as api_server:
        assert api_server.http.get("/version").json() == {"version": compiled_llm.__version__}
        answered = api_server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert answered.json()["usage"]["completion_tokens"] == 3
    assert checks.packages()
    assert checks.ourselves().status == "warning"
    assert CliRunner().invoke(app, ["--version"]).output == f"compiled-llm {compiled_llm.__version__}\n"


def test_before_the_model_is_ready_it_says_how_far_that_is_and_since_when(path: Path) -> None:
    loop = Loop(path)
    with running_server(loop.server._path, wait=False) as api_server:
        api_server.api_server.link._since -= 100
        for doing, counted in (
            ("tracing prefill", {}),
            ("compiling decode, 4 rows, once", {"step": 2, "steps": 4}),
            ("downloading weights (1 of 2)", {}),  # words are not read
        ):
            loop.server.report(doing, **counted)
            until(lambda doing=doing: api_server.http.get("/ready").json()["doing"] == doing)
            found = api_server.http.get("/ready").json()
            assert 100 <= found.pop("seconds") < 200
            assert found == {"ready": False, "doing": doing, **counted}
    loop.close()


def test_before_the_model_is_ready_requests_hear_what_is_done(path: Path) -> None:
    loop = Loop(path)
    loop.server.report("loading weights")
    with running_server(loop.server._path, wait=False) as api_server:
        until(lambda: api_server.http.get("/ready").json()["doing"] == "loading weights")
        assert api_server.http.get("/ready").status_code == 503
        assert api_server.http.get("/health").status_code == 200
        refused = api_server.http.post("/v1/completions", json={"prompt": "a"})
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


# ---- the OpenAPI document


OPENAIS = ("v1/chat/completions", "v1/completions", "v1/responses", "v1/models")
PATHS = (*OPENAIS, "tokenize", "detokenize", "ready", "metrics")


def test_the_document_names_what_is_served(api_server: RunningServer) -> None:
    document = api_server.http.get("/openapi.json").json()
    assert set(document["paths"]) >= {f"/{path}" for path in PATHS}
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["functions"]["description"] == "Not served: give tools."
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "429", "503"} <= set(answers)


@pytest.mark.whole
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_made_up_requests_get_promised_answers(api_server: RunningServer, right: bool, seed: int) -> None:
    schemathesis: Any = pytest.importorskip("schemathesis")
    import hypothesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_url(f"{api_server.url}/openapi.json")
    failures = []
    # There is nothing wrong to ask of those that take nothing.
    chosen = schema if right else schema.include(method="POST")
    for operation in chosen.get_all_operations():
        mode = schemathesis.GenerationMode.POSITIVE if right else schemathesis.GenerationMode.NEGATIVE

        @hypothesis.seed(seed)
        @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.ok().as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            response = case.call(base_url=api_server.url, timeout=PATIENCE)  # an answer goes on for long
            assert response.status_code < 500, response.text
            case.validate_response(response, excluded_checks=[positive_data_acceptance])  # a template may refuse it

        try:
            check()
        except Exception as error:
            failures.append(f"{operation.ok().label}: {error}")
    assert not failures, "\n\n".join(failures)


def test_to_watch_a_server_does_not_fill_its_log(api_server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    ids = []
    with caplog.at_level("INFO", "compiled_llm.server"):
        for path in ("/metrics", "/ready", "/health", "/page/chat.js", "/version"):
            answer = api_server.http.get(path)
            assert answer.status_code == 200
            ids.append(answer.headers["x-request-id"])
        until(lambda: " GET /version 200 " in caplog.text)
    assert [number for number in ids if number in caplog.text] == ids[-1:]  # lines of earlier tests may come late


def test_models_say_how_many_images_and_bytes_a_request_can_have(api_server: RunningServer, talker: Any) -> None:
    seeing, reading = talker.models.list().data[0], api_server.http.get("/v1/models").json()["data"][0]
    assert (seeing.limit_mm_per_prompt, seeing.max_body_bytes) == ({"image": 16}, 32 * 2**20)
    assert (reading["limit_mm_per_prompt"], reading["max_body_bytes"]) == ({"image": 0}, 2**17)
