"""Images are decoded in a worker process with limits, which is started with the first one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.huggingface.word_processor import as_file, painted
from support.server.engine_processes import until
from support.server.images import data_url, shown

CHAT = "/v1/chat/completions"
RED = as_file(painted(1))


def ask(seen, url: str = data_url(RED)):
    return seen.server.http.post(CHAT, json={"messages": shown(url), "max_tokens": 1})


def test_the_worker_is_started_with_the_first_image_and_again_if_it_dies(seen):
    served: Any = seen.engine.processor
    served.close()
    vars(served).update(_reader=None)  # as if no image had come yet
    seen.server.post(CHAT, messages=[{"role": "user", "content": "w1"}], max_tokens=1)
    assert served._reader is None
    assert ask(seen).status_code == 200
    first = served._reader.decoder.pid
    assert len(list(Path(f"/proc/{first}/task").iterdir())) == 1, "a process with threads must not fork"
    assert "libtorch" not in Path(f"/proc/{first}/maps").read_text()
    os.kill(first, signal.SIGKILL)
    until(lambda: ") Z " in Path(f"/proc/{first}/stat").read_text())  # its sockets are closed by then
    assert ask(seen).status_code == 200
    assert served._reader.decoder.pid != first


def test_a_image_that_takes_too_much_is_refused_and_the_next_one_is_decoded(seen):
    from compiled_llm.engine.apart.exchange import Failed
    from compiled_llm.engine.apart.unwanted import UnwantedError
    from compiled_llm.server.images.decoder_process import DecoderProcess
    from compiled_llm.server.images.messages import Decode, Decoded, FromWorker

    large = as_file(painted(1, 700, 700))
    process: DecoderProcess = seen.engine.processor._loaded().decoder

    def decoded(memory: int) -> Decoded | Failed | None:
        return process.answered(lambda: process._ask(Decode(large, 2**24, 9, memory)), FromWorker, lambda: True)

    failed = decoded(2**22)
    assert isinstance(failed, Failed)
    assert failed.kind == "limit"
    assert isinstance(decoded(2**27), Decoded)
    with pytest.raises(UnwantedError):
        process.decoded(large, 2**24, lambda: False)
    assert process.decoded(large, 1000) == Failed("limit", "it has 700 x 700 pixels, and at most 1,000 are decoded")


def test_an_api_server_that_has_read_a_image_has_imported_neither_pillow_nor_a_processor():
    script = (
        "import sys, asyncio\n"
        "from compiled_llm.server.images.sources import GivenImage, files_of\n"
        "from compiled_llm.server.settings import ApiServerSettings\n"
        f"image = GivenImage('a', {data_url(RED)!r})\n"
        "assert asyncio.run(files_of([image], ApiServerSettings(names=('a',))))\n"
        "print([name for name in ('PIL', 'torch', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
