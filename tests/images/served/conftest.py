"""One server of a tiny vision-language model, for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch

from compiled_llm.engine.engine import Engine
from support.huggingface.word_processor import as_file, painted, qwen_processor
from support.images import seeing
from support.parity import assert_account_is_empty
from support.server.engine_processes import Loop, engine_in_thread
from support.server.running_servers import RunningServer, running_server


class Seeing(NamedTuple):
    """An engine, the API server of its process, a folder whose files may be asked for, and the engine process."""

    engine: Engine
    server: RunningServer
    media: Path
    loop: Loop


@pytest.fixture(scope="package")
def seen() -> Iterator[Seeing]:
    from compiled_llm.server.images.processor import ServedProcessor  # a part that can be taken out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    processor, model = qwen_processor(), seeing("Qwen3VL", tokens=800)
    served = ServedProcessor(lambda: processor)
    with (
        tempfile.TemporaryDirectory(prefix="uds-") as name,
        Engine(model, tokenizer=processor.tokenizer, processor=served) as engine,
    ):
        folder = Path(name)
        processor.tokenizer.chat_template = processor.chat_template
        processor.tokenizer.save_pretrained(folder / "tokenizer")
        media = folder / "media"
        media.mkdir()
        (media / "red.png").write_bytes(as_file(painted(1)))
        (folder / "outside.png").write_bytes(as_file(painted(2)))
        options: dict[str, Any] = {
            "allowed_local_media_path": media,
            "allowed_media_domains": ("127.0.0.1", "localhost", "a.example"),
        }
        options |= {"max_image_bytes": 2**20}
        with (
            engine_in_thread(engine, folder / "socket", folder / "tokenizer") as loop,
            running_server(loop.server._path, **options) as server,
        ):
            yield Seeing(engine, server, media, loop)
        served.close()
    assert_account_is_empty(model)
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def client(seen: Seeing) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{seen.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
