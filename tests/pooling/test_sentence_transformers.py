"""The real sentence-transformers writes a model's folder, embeds and ranks the same; `tox -e trainers` installs it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from compiled_llm.engine.engine import Engine
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny, wrapped
from support.pooling import PAIRS, assert_alike
from support.server.engine_processes import engine_in_thread
from support.server.running_servers import running_server

pytest.importorskip("sentence_transformers")
TEXTS = ["a cat", "the taxes rose again, and again", "x"]


def test_a_folder_that_it_has_written_is_embedded_alike(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tokenizer: Any = byte_level()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path / "plain")
    tiny(vocab_size=380, max_position_embeddings=256).save_pretrained(tmp_path / "plain")
    modules = [Transformer(str(tmp_path / "plain")), Pooling(64, "lasttoken"), Normalize()]
    prompts = {"query": "Find: ", "document": ""}
    theirs = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    theirs.save_pretrained(str(tmp_path / "written"))

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "written").eval()
    with Engine(wrapped(plain=plain), tokenizer=byte_level()) as engine:
        for name in (None, *prompts):
            expected = torch.tensor(theirs.encode(TEXTS, prompt_name=name))
            assert_alike(engine.embed(TEXTS, prompt_name=name), expected)


PAIRS_TEXT = [("who barks?", text) for text in ("a dog barks at night", "cats purr", "the taxes rose again, and again")]


def ranked(model: Any, tokenizer: Any, folder: Path) -> list[float]:
    """The scores of the pairs that ``/v1/rerank`` gives."""
    tokenizer.save_pretrained(folder / "tokenizer")
    with (
        Engine(wrapped(plain=model), tokenizer=tokenizer) as engine,
        engine_in_thread(engine, folder / "s", folder / "tokenizer"),
        running_server(folder / "s") as api_server,
    ):
        documents = [document for _, document in PAIRS_TEXT]
        found = api_server.post("/v1/rerank", query=PAIRS_TEXT[0][0], documents=documents)["results"]
    scores = {entry["index"]: entry["relevance_score"] for entry in found}
    return [scores[place] for place in range(len(documents))]


def test_a_reranker_that_it_has_written_ranks_alike(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    tokenizer: Any = deepcopy(byte_level())
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template = tokenizer.eos_token, "left", PAIRS
    tokenizer.save_pretrained(tmp_path / "plain")
    tiny(vocab_size=380, max_position_embeddings=256).save_pretrained(tmp_path / "plain")
    options = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(str(tmp_path / "plain"), transformer_task="text-generation", processing_kwargs=options)
    modules = [transformer, LogitScore(70, 75)]
    theirs = CrossEncoder(modules=modules, prompts={"query": "Judge."}, default_prompt_name="query", device="cpu")
    theirs.save_pretrained(str(tmp_path / "written"))

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "written").eval()
    assert ranked(plain, tokenizer, tmp_path) == pytest.approx(theirs.predict(PAIRS_TEXT).tolist(), abs=1e-5)


def test_a_cross_encoder_with_a_head_ranks_alike(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    tokenizer: Any = deepcopy(byte_level())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "plain")
    config = deepcopy(tiny(vocab_size=380, max_position_embeddings=256).config)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "plain")
    theirs = CrossEncoder(str(tmp_path / "plain"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "written"))

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "written").eval()
    assert ranked(plain, tokenizer, tmp_path) == pytest.approx(theirs.predict(PAIRS_TEXT).tolist(), abs=1e-5)
