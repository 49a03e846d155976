"""``/v1/systemone`` and ``/v1/decisions`` answer as ``engine.decide`` does, and refuse by the field's path."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.decisions.decider import Decider
from support.engine.decisions import SETTINGS, check, deciding, saved_settings
from support.server.engine_processes import engine_in_thread
from support.server.running_servers import RunningServer, running_server

pytest.importorskip("transformers.decision", reason="decisions need transformers 5.24")
pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM_ONE, DECISIONS = "/v1/systemone", "/v1/decisions"
STATE = "the order was charged twice " * 6
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is a refund wanted?"},
    "tone": {"type": "choice", "instructions": "The tone?", "criteria": {"calm": "polite", "angry": None}},
    "how urgent": {"type": "score", "criteria": ["can wait", "this week: soon"]},
}
OPENAI: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Is a refund wanted?", "name": "refund"},
    {
        "type": "choice",
        "instructions": "The tone?",
        "choices": [{"value": "calm", "description": "polite"}, {"value": "angry"}],
    },
    {
        "type": "score",
        "instructions": "",
        "levels": [{"label": "can wait"}, {"label": "this week", "description": "soon"}],
    },
]
ASKED = {"state": STATE, "questions": QUESTIONS}
IMAGE = {"type": "input_image", "image_url": "data:,"}
PREDICATE = {"type": "predicate", "instructions": "a"}
A_LONG, A_LONG_CHOICE, LONG = "questions.a.instructions", "questions.a.criteria", "long " * 2000
LONG_CHOICE = {"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "b", "description": LONG}]}
LONG_LEVEL = {"type": "score", "instructions": "a", "levels": [{"label": "a"}, {"label": LONG}]}
TWICE = {"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "a"}]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = saved_settings(tmp_path_factory.mktemp("model"))
    with deciding(folder) as engine:
        engine._tokenizer.save_pretrained(folder)
        yield engine


@pytest.fixture(scope="module")
def api_server(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("s") / "s"
    folder = Path(str(engine._model.name_or_path))
    with engine_in_thread(engine, path, folder), running_server(path, max_choices=80) as api_server:
        yield api_server


def test_systemone_answers_as_the_engine(engine: Engine, api_server: RunningServer) -> None:
    found, expected = api_server.post(SYSTEM_ONE, **ASKED), engine.decide(STATE, QUESTIONS)
    check(found["answers"], expected)
    assert found["usage"]["input_tokens"] == expected.prompt_tokens
    assert found["usage"]["output_tokens"] == 0
    assert found["diagnostics"].keys() == QUESTIONS.keys()
    for name, own in found["diagnostics"].items():
        assert own["label_mass"] == pytest.approx(expected.diagnostics[name].label_mass, rel=1e-4)
        assert own["argmax_is_label"] is expected.diagnostics[name].argmax_is_label


def test_decisions_are_translated(engine: Engine, api_server: RunningServer) -> None:
    content = [{"type": "input_text", "text": STATE}]
    found = api_server.post(DECISIONS, input=[{"role": "user", "content": content}], questions=OPENAI)
    expected = engine.decide(STATE, QUESTIONS)
    predicate, choice, score = found["answers"]
    assert (predicate["type"], predicate["name"]) == ("predicate", "refund")
    assert predicate["probability"] == pytest.approx(expected["refund"]["noul"], abs=1e-5)
    tone = expected["tone"]
    assert choice["choice"] == tone["choice"]
    assert {own["value"]: own["probability"] for own in choice["probabilities"]} == pytest.approx(
        tone["probabilities"], abs=1e-5
    )
    mass = expected.diagnostics["tone"].label_mass
    assert choice["confidence"] == pytest.approx(max(tone["probabilities"].values()) * mass, rel=1e-4)
    assert [own["label"] for own in score["probabilities"]] == ["can wait", "this week"]
    assert score["score"] == pytest.approx(sum(own["value"] * own["probability"] for own in score["probabilities"]))


def test_values_that_are_alike_as_text_are_told_apart(api_server: RunningServer) -> None:
    question = {"type": "choice", "instructions": "a", "choices": [{"value": True}, {"value": "true"}]}
    (answer,) = api_server.post(DECISIONS, input="a", questions=[question])["answers"]
    assert [own["value"] for own in answer["probabilities"]] == [True, "true"]


def test_questions_of_one_request_compute_the_state_once(api_server: RunningServer) -> None:
    questions = {f"q{n}": {"type": "noul", "instructions": f"Is it {n}?"} for n in range(8)}
    usage = api_server.post(SYSTEM_ONE, state="a cow moos " * 50, questions=questions, cache_salt="once")["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] * 3 / 4
    other = api_server.post(SYSTEM_ONE, state="a cow moos " * 50, questions=questions, cache_salt="twice")["usage"]
    assert other == usage


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SYSTEM_ONE, {"questions": QUESTIONS}, "state"),
        (SYSTEM_ONE, {**ASKED, "state": 5}, "state"),
        (SYSTEM_ONE, {**ASKED, "state": "\ud800"}, "state"),
        (SYSTEM_ONE, {**ASKED, "state": "long " * 2000}, "state"),
        (SYSTEM_ONE, {**ASKED, "questions": {}}, "questions"),
        (SYSTEM_ONE, {**ASKED, "questions": {"a b": {"type": "x"}}}, "questions.a b"),
        (SYSTEM_ONE, {**ASKED, "questions": {"a": {"type": "noul", "x": 1}}}, "questions.a"),
        (SYSTEM_ONE, {**ASKED, "questions": {"a": {"type": ["noul"]}}}, "questions.a"),
        (SYSTEM_ONE, {**ASKED, "questions": {str(n): {"type": "noul"} for n in range(65)}}, "questions"),
        (SYSTEM_ONE, {**ASKED, "assets": {"img": {"data_base64": ""}}}, "assets"),
        (SYSTEM_ONE, {**ASKED, "temperature": 1}, "temperature"),
        (SYSTEM_ONE, {**ASKED, "state": [12345] * 5000}, "state"),
        (SYSTEM_ONE, {**ASKED, "questions": {"a": {"type": "noul", "instructions": "long " * 2000}}}, A_LONG),
        (SYSTEM_ONE, {**ASKED, "questions": {"a": {"type": "noul", "instructions": "long " * 2**20}}}, A_LONG),
        (
            SYSTEM_ONE,
            {**ASKED, "questions": {"a": {"type": "choice", "criteria": {"b": LONG}}}},
            "questions.a.criteria",
        ),
        (SYSTEM_ONE, {"state": "a", "questions": {"a": {"type": "score", "criteria": [LONG]}}}, A_LONG_CHOICE),
        (DECISIONS, {"input": "a", "questions": [{**PREDICATE, "instructions": LONG}]}, "questions[0].instructions"),
        (DECISIONS, {"input": "a", "questions": [PREDICATE, LONG_CHOICE]}, "questions[1].choices"),
        (DECISIONS, {"input": "a", "questions": [PREDICATE, LONG_LEVEL]}, "questions[1].levels"),
        (DECISIONS, {"input": LONG, "questions": [PREDICATE]}, "input"),
        (DECISIONS, {"input": "a", "questions": []}, "questions"),
        (DECISIONS, {"input": "a", "questions": [PREDICATE, {"type": "noul"}]}, "questions[1]"),
        (DECISIONS, {"input": "a", "questions": [TWICE]}, "questions[0].choices[1].value"),
        (DECISIONS, {"input": [{"role": "user", "content": [IMAGE]}], "questions": [PREDICATE]}, "input[0].content[0]"),
        (DECISIONS, {"input": [{"role": "system", "content": "a"}], "questions": [PREDICATE]}, "input[0].role"),
    ],
    ids=lambda value: str(value)[-50:],
)
def test_what_is_impossible_is_refused_by_its_path(
    api_server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    content = json.dumps(body)  # which can write half a character
    response = api_server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SYSTEM_ONE, {"state": "a", "questions": {"a": {"type": "noul", "instructions": "long " * 5000}}}),
        (SYSTEM_ONE, {"state": "long " * 1000, "questions": {str(n): {"type": "noul"} for n in range(8)}}),
        (DECISIONS, {"input": "a", "questions": [{**PREDICATE, "instructions": "long " * 5000}]}),
    ],
    ids=["instructions", "the state of several", "decisions"],
)
def test_long_texts_leave_the_event_loop(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads, reads = [], Decider.reads

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return reads(*arguments)

    monkeypatch.setattr(Decider, "reads", noted)
    for length, given in ((0, ASKED), (1, body)):
        api_server.http.post(path if length else SYSTEM_ONE, json=given)
        assert len(threads) == length + 1
    assert threads[0] is api_server._thread
    assert threads[1] is not api_server._thread


def test_texts_that_surely_do_not_fit_are_not_made_tokens(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("it has been made tokens")

    monkeypatch.setattr(Decider, "_tokens", fail)
    for field, value in (("instructions", "a" * 2**20), ("criteria", {"true": "a" * 2**20})):
        questions = {"short": {"type": "noul"}, "long": {"type": "noul", field: value}}
        response = api_server.http.post(SYSTEM_ONE, json={"state": "a", "questions": questions})
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert (error["param"], error["code"]) == (f"questions.long.{field}", "context_length_exceeded")


def test_labels_that_are_not_single_tokens_are_refused(engine: Engine, api_server: RunningServer) -> None:
    question = {"type": "choice", "criteria": {str(n): None for n in range(27)}}
    response = api_server.http.post(SYSTEM_ONE, json={"state": "a", "questions": {"many": question}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "questions.many")
    assert SETTINGS["labels"].keys() == {"noul"}


def test_a_model_that_cannot_be_asked_has_no_such_path(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_llm.server.decisions.endpoint._deciders", {})
    monkeypatch.delattr("transformers.decision.template_utils.DECISION_PROMPT")
    response = api_server.http.post(SYSTEM_ONE, json=ASKED)
    assert response.status_code == 404
    assert "decisions need transformers 5.24" in response.json()["error"]["message"]
    response = api_server.http.post("/v1/nothing", json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith("POST /v1/nothing: is not served here")


def test_both_are_described(api_server: RunningServer) -> None:
    paths = api_server.http.get("/openapi.json").json()["paths"]
    assert {SYSTEM_ONE, DECISIONS} <= paths.keys()
    assert api_server.http.get(SYSTEM_ONE).status_code == 405
