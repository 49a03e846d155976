"""The real sentence-transformers writes a model's folder, and embeds the same; `tox -e trainers` installs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled_llm.engine.engine import Engine
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny, wrapped
from support.pooling import assert_alike

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
