"""``/v1/embeddings`` gives what ``engine.embed`` does, to OpenAI's client, too, and refuses by the field's path."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from compiled_llm.client import Client
from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process.facts import ready_of
from compiled_llm.server.http.api_error import ApiError
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary
from compiled_llm.server.pooling import endpoint
from compiled_llm.server.pooling.prompts import of_input
from compiled_llm.server.pooling.request import EmbeddingsRequest
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny, wrapped
from support.pooling import LAST, assert_alike, last_states, written
from support.server.engine_processes import Loop, engine_in_thread
from support.server.running_servers import RunningServer, running_server

PATH = "/v1/embeddings"
TEXTS = ["a cat", "the taxes rose again, and again", "x", "a cat sat on a mat", "y"]


@pytest.fixture(scope="module")
def engine_process(engine: Engine, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with engine_in_thread(engine, tmp_path_factory.mktemp("s") / "s", folder) as loop:
        yield loop


@pytest.fixture(scope="module")
def api_server(engine_process: Loop) -> Iterator[RunningServer]:
    with running_server(engine_process.server._path, max_choices=3) as api_server:
        yield api_server


def embedded(response: Any) -> torch.Tensor:
    assert [entry["index"] for entry in response["data"]] == list(range(len(response["data"])))
    return torch.tensor([entry["embedding"] for entry in response["data"]])


def test_openai_s_client_gets_the_engine_s_embeddings(api_server: RunningServer, engine: Engine) -> None:
    """It asks for base64; there are more texts than run at once."""
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="tiny", input=TEXTS)
        short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16)
    tokens = sum(len(byte_level()(text)["input_ids"]) for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (tokens, tokens, "tiny")
    assert_alike(torch.tensor([entry.embedding for entry in found.data]), engine.embed(TEXTS))
    assert_alike(torch.tensor([short.data[0].embedding]), engine.embed(TEXTS[0], 16))


def test_texts_and_ids_are_huggingface_s_in_both_encodings(api_server: RunningServer, seed: int) -> None:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, 380, (length,), generator=generator).tolist() for length in (3, 16, 17, 45, 1)]
    expected = last_states(tiny(vocab_size=380, max_position_embeddings=256), rows)
    assert_alike(embedded(api_server.post(PATH, input=rows)), expected)
    assert_alike(embedded(api_server.post(PATH, input=rows[2])), expected[2:3])
    coded = api_server.post(PATH, input=rows, encoding_format="base64")
    numbers = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in coded["data"]]
    assert_alike(torch.tensor(np.stack(numbers)), expected)


def test_texts_begin_with_a_prompt_by_its_name(api_server: RunningServer, engine: Engine) -> None:
    found = embedded(api_server.post(PATH, input=TEXTS, prompt_name="query"))
    assert_alike(found, engine.embed(TEXTS, prompt_name="query"))
    assert torch.cosine_similarity(found, engine.embed(TEXTS)).min() < 0.9999


def test_texts_are_cut_as_their_tokenizer_would(api_server: RunningServer, engine: Engine) -> None:
    ids = [byte_level()(text)["input_ids"] for text in TEXTS]
    for side, kept in (("right", slice(0, 3)), ("left", slice(-3, None)), (None, slice(0, 3))):
        sided = {} if side is None else {"truncation_side": side}
        found = api_server.post(PATH, input=TEXTS, truncate_prompt_tokens=3, **sided)
        assert found["usage"]["prompt_tokens"] == sum(min(3, len(own)) for own in ids)
        assert_alike(embedded(found), engine.embed([own[kept] for own in ids]))
        assert_alike(embedded(api_server.post(PATH, input=ids, truncate_prompt_tokens=3, **sided)), embedded(found))
    long = [7] * 300
    assert_alike(embedded(api_server.post(PATH, input=long, truncate_prompt_tokens=-1)), engine.embed([long[:256]]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", ["$A", "$A </s>", "<s> $A", "<s> $A </s>"])
def test_tokens_that_a_tokenizer_adds_to_a_text_stay(template: str, side: str) -> None:
    """As in HuggingFace's cut, so that Qwen3-Embedding's last token is the one that it was trained to pool."""
    tokenizer: Any = deepcopy(byte_level())
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    tokenizer.truncation_side = side
    ready = SimpleNamespace(max_tokens=256, vocabulary=380)
    model: Any = SimpleNamespace(vocabulary=Vocabulary(deepcopy(tokenizer)), ready=ready)
    text = "a text of some letters"

    def cut(most: int) -> list[int]:
        return of_input(model, EmbeddingsRequest(input=text, truncate_prompt_tokens=most), "input", text)

    added = template.count("s>")
    for most in range(1 + added, 40):
        assert cut(most) == tokenizer(text, truncation=True, max_length=most)["input_ids"]
    if added:
        with pytest.raises(ApiError, match=f"give {1 + added} or more, since the tokenizer adds"):
            cut(added)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [[5], [380]]}, "input[1]"),
        ({"input": [5, -1]}, "input"),
        ({"input": ["a", "long " * 300]}, "input[1]"),
        ({"input": ["\ud800"]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "answer"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "colour": "red"}, "colour"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_impossible_is_refused_by_its_path(api_server: RunningServer, body: dict[str, Any], param: str) -> None:
    content = json.dumps(body)  # which can write half a character
    response = api_server.http.post(PATH, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_more_numbers_than_an_answer_has_are_refused(
    api_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_MAX_NUMBERS", 100)
    response = api_server.http.post(PATH, json={"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert api_server.http.post(PATH, json={"input": ["a", "b"], "dimensions": 50}).status_code == 200


def test_a_text_whose_time_is_over_has_no_vector(engine_process: Loop) -> None:
    with running_server(engine_process.server._path, request_seconds=1e-6) as api_server:
        response = api_server.http.post(PATH, json={"input": ["a"]})
    assert (response.status_code, response.json()["error"]["param"]) == (408, "input[0]")


def test_clients_in_other_processes_get_vectors(engine_process: Loop, engine: Engine) -> None:
    with Client(engine_process.server._path) as client:
        handles = [client.submit(row, pooled=True) for row in ([5, 6, 7], [8])]
        vectors = torch.tensor([list(handle.result(60).outputs[0].pooled or ()) for handle in handles])
    assert_alike(vectors, engine.embed([[5, 6, 7], [8]]))


def test_what_the_model_does_not_make_is_said(api_server: RunningServer) -> None:
    for path, body, said in (
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "names no LogitScore"),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, "names no LogitScore"),
        ("/classify", {"input": "a"}, "has no head that classifies"),
    ):
        response = api_server.http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_served")
        assert said in response.json()["error"]["message"]
    paths = api_server.http.get("/openapi.json").json()["paths"]
    assert {PATH, "/v1/rerank", "/v2/rerank", "/rerank", "/score", "/v1/score", "/classify"} <= paths.keys()


def test_a_folder_that_does_not_say_how_to_pool_is_told_once_asked(tmp_path: Path) -> None:
    """Without its place, which is nobody's business; an option says it instead, and contradicts nothing."""
    model = wrapped(plain=tiny(vocab_size=380))
    with Engine(model, tokenizer=byte_level()) as engine:
        named = ready_of(model, engine, "tiny", pooling="last").pooled.embedding
        assert not isinstance(named, str)
        assert named.width == 64
        byte_level().save_pretrained(tmp_path)
        with (
            engine_in_thread(engine, tmp_path / "s", tmp_path) as loop,
            running_server(loop.server._path) as api_server,
        ):
            response = api_server.http.post(PATH, json={"input": "a"})
        assert response.status_code == 404
        assert "neither modules.json beside the model nor an option" in response.json()["error"]["message"]
        model.name_or_path = str(written(tmp_path, {**LAST, "pooling_mode": "mean"}))
        with pytest.raises(ValueError, match=r"^pooling='last': .* pools by 'mean', and only 'lasttoken' is served"):
            ready_of(model, engine, "tiny", pooling="last")
