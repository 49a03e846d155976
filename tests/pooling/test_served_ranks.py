"""``/v1/rerank`` orders documents as HuggingFace's logits of two tokens do, or a classifier's only label."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process.facts import ready_of
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny, wrapped
from support.pooling import PAIRS, classifier_of, written_ranks
from support.server.engine_processes import engine_in_thread
from support.server.running_servers import RunningServer, running_server

PATH, YES, NO = "/v1/rerank", 70, 75
QUERY = "who barks?"
DOCUMENTS = ["a dog barks at night, and so does another", "cats purr", "a", "taxes rose again, " * 4, "dogs"]


def model_of_pairs() -> Any:
    return tiny(vocab_size=380, max_position_embeddings=256)


def tokenizer_of_pairs() -> Any:
    tokenizer: Any = deepcopy(byte_level())
    tokenizer.chat_template = PAIRS
    return tokenizer


def log_odds(prompt: str) -> float:
    """How much likelier HuggingFace's model says yes than no."""
    with torch.no_grad():
        logits = model_of_pairs()(torch.tensor([byte_level()(prompt)["input_ids"]])).logits[0, -1]
    return float(logits[YES] - logits[NO])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = written_ranks(tmp_path_factory.mktemp("reranker"), YES, NO, "Judge.")
    tokenizer_of_pairs().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranking(ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = wrapped(800, model_of_pairs(), prefill_tokens=32)
    model.name_or_path = str(ranks)
    with Engine(model, tokenizer=tokenizer_of_pairs()) as engine:
        yield engine


@pytest.fixture(scope="module")
def api_server(ranking: Engine, ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("s") / "s"
    with engine_in_thread(ranking, path, ranks), running_server(path, max_choices=2) as api_server:
        yield api_server


def expected() -> dict[int, float]:
    prompts = [f"system: Judge.\nquery: {QUERY}\ndocument: {text}\nanswer:" for text in DOCUMENTS]
    scores = torch.sigmoid(torch.tensor([log_odds(prompt) for prompt in prompts])).tolist()
    return dict(sorted(enumerate(scores), key=lambda own: -own[1]))


def test_documents_are_ordered_by_the_log_probabilities_of_two_tokens(api_server: RunningServer) -> None:
    found = api_server.post(PATH, query=QUERY, documents=DOCUMENTS)
    scores = {entry["index"]: entry["relevance_score"] for entry in found["results"]}
    assert list(scores) == list(expected())
    assert scores == pytest.approx(expected(), abs=1e-5)
    assert [entry["document"]["text"] for entry in found["results"]] == [DOCUMENTS[place] for place in scores]
    assert found["usage"]["total_tokens"] > 0
    assert found["model"] == "tiny"


def test_the_best_alone_without_texts_and_without_an_activation(api_server: RunningServer) -> None:
    documents: list[Any] = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    for path in (PATH, "/rerank", "/v2/rerank"):
        asked = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
        found = api_server.post(path, **asked, use_activation=False)["results"]
        assert [entry["index"] for entry in found] == list(expected())[:2]
        assert all(entry["document"] is None for entry in found)
        odds = torch.logit(torch.tensor(list(expected().values())[:2])).tolist()
        assert [entry["relevance_score"] for entry in found] == pytest.approx(odds, abs=1e-4)
    assert len(api_server.post(PATH, query=QUERY, documents=documents, top_n=0)["results"]) == len(documents)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": "a"}, "documents"),
        ({"query": "a", "documents": ["b", {"image": "c"}]}, "documents[1].text"),
        ({"query": "a", "documents": ["b", 5]}, "documents[1]"),
        ({"query": "a", "documents": ["b", "long " * 300]}, "documents[1]"),
        ({"query": "a", "documents": ["b", "\ud800"]}, "documents[1]"),
        ({"query": "a", "documents": ["b"] * 2049}, "documents"),
        ({"query": "a" * 2**14, "documents": ["b"] * 2000}, "query"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_impossible_is_refused_by_its_path(api_server: RunningServer, body: dict[str, Any], param: str) -> None:
    content = json.dumps(body)
    response = api_server.http.post(PATH, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("no", "settings", "said"),
    [
        (None, {}, "LogitScore has one token alone"),
        (NO, {"activation_fn": "torch.nn.modules.activation.Tanh"}, "name the activation '.*Tanh'"),
    ],
)
def test_files_that_cannot_be_followed_say_so(
    ranking: Engine, no: Any, settings: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking.model, "name_or_path", str(written_ranks(tmp_path, YES, no, **settings)))
    found = ready_of(ranking.model, ranking, "tiny").pooled.ranking
    assert isinstance(found, str)
    assert re.search(said, found)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_have_the_scores_of_ranks_in_their_own_order(api_server: RunningServer, path: str) -> None:
    ours = dict(sorted(expected().items()))
    found = api_server.post(path, text_1=QUERY, text_2=DOCUMENTS)
    assert [entry["index"] for entry in found["data"]] == list(ours)
    assert [entry["score"] for entry in found["data"]] == pytest.approx(list(ours.values()), abs=1e-5)
    both = {"queries": [QUERY] * 2, "documents": DOCUMENTS[:2], "use_activation": False}
    odds = torch.logit(torch.tensor([ours[0], ours[1]])).tolist()
    scores = [entry["score"] for entry in api_server.post(path, **both)["data"]]
    assert scores == pytest.approx(odds, abs=1e-4)
    assert len(api_server.post(path, text_1="a", text_2="b")["data"]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_2"),
        ({"text_1": [], "text_2": "b"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_2"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ({"text_1": "a" * 2**14, "text_2": ["b"] * 2000}, "text_1"),
        ({"text_1": "a", "text_2": ["b", "long " * 300]}, "text_2[1]"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_impossible_pairs_are_refused_by_their_path(
    api_server: RunningServer, body: dict[str, Any], param: str
) -> None:
    response = api_server.http.post("/score", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_pairs_without_a_template_and_another_activation(
    ranking: Engine, ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"activation_fn": "torch.nn.modules.linear.Identity"}
    folder = written_ranks(tmp_path, YES, NO, "Q: ", chat=False, **settings)
    monkeypatch.setattr(ranking.model, "name_or_path", str(folder))
    with engine_in_thread(ranking, tmp_path / "s", ranks), running_server(tmp_path / "s") as api_server:
        found = api_server.post(PATH, query=QUERY, documents=DOCUMENTS)["results"]
    scores = {entry["index"]: entry["relevance_score"] for entry in found}
    ours = {place: log_odds(f"Q: {QUERY}{text}") for place, text in enumerate(DOCUMENTS)}
    assert scores == pytest.approx(ours, abs=1e-3)


# ---- classifiers


@pytest.fixture(scope="module", params=[1, 3])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A classifier's server, and the classifier unwrapped."""
    folder = tmp_path_factory.mktemp("s")
    byte_level().save_pretrained(folder)
    with (
        Engine(
            wrapped(400, classifier_of(model_of_pairs(), request.param), prefill_tokens=32), tokenizer=byte_level()
        ) as engine,
        engine_in_thread(engine, folder / "s", folder),
        running_server(folder / "s") as api_server,
    ):
        yield api_server, classifier_of(model_of_pairs(), request.param)


def logits(plain: Any, *texts: str) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([plain(torch.tensor([byte_level()(text)["input_ids"]])).logits for text in texts])


def test_classifiers_label_texts(judged: tuple[Any, Any]) -> None:
    api_server, plain = judged
    raw, one = logits(plain, *DOCUMENTS), plain.config.num_labels == 1
    expected = raw.sigmoid() if one else raw.softmax(1)
    found = api_server.post("/classify", input=DOCUMENTS)
    torch.testing.assert_close(torch.tensor([own["probs"] for own in found["data"]]), expected, rtol=1e-4, atol=1e-5)
    assert [own["label"] for own in found["data"]] == [f"label {place}" for place in raw.argmax(1).tolist()]
    assert found["data"][0]["num_classes"] == plain.config.num_labels
    plainly = api_server.post("/classify", input=byte_level()("cats")["input_ids"], use_activation=False)
    torch.testing.assert_close(torch.tensor([plainly["data"][0]["probs"]]), logits(plain, "cats"), rtol=1e-4, atol=1e-5)


def test_a_classifier_of_one_label_ranks_documents(judged: tuple[Any, Any]) -> None:
    api_server, plain = judged
    response = api_server.http.post(PATH, json={"query": QUERY, "documents": DOCUMENTS})
    if plain.config.num_labels > 1:
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_served")
        assert "has 3 labels" in response.json()["error"]["message"]
        return
    scores = {entry["index"]: entry["relevance_score"] for entry in response.json()["results"]}
    ours = logits(plain, *(QUERY + text for text in DOCUMENTS)).sigmoid()[:, 0].tolist()
    assert scores == pytest.approx(dict(enumerate(ours)), abs=1e-5)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_a_classifier_answers_nothing_else_and_says_what_it_does(judged: tuple[Any, Any], path: str, body: Any) -> None:
    response = judged[0].http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_served")
    assert "POST /classify gives its scores" in response.json()["error"]["message"]


def test_the_page_learns_that_a_classifier_writes_nothing(judged: tuple[Any, Any], api_server: RunningServer) -> None:
    written = [one.http.get("/v1/models").json()["data"][0]["output_modalities"] for one in (judged[0], api_server)]
    assert written == [[], ["text"]]
