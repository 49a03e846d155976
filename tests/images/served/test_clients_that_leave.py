"""Images of clients that have left are not decoded, and clients whose images are slow do not keep others waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from compiled_llm.client import Client
from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.protocol.messages import ImagePrompt
from compiled_llm.requests.sampling_params import SamplingParams
from support.huggingface.word_processor import as_file, painted
from support.server.engine_processes import PATIENCE, until
from support.server.images import data_url, png, shown

CHAT = "/v1/chat/completions"
RED = as_file(painted(1))
SLOW = png(2048, 2048)


class Slow:
    """A decoder that takes as long as it is told to for large images, and notes how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from compiled_llm.server.images.decoder_process import DecoderProcess
        from compiled_llm.server.images.messages import Decoded

        self.free, self.begun, self.ended = threading.Event(), 0, 0
        self.wanted: Callable[[], bool] = lambda: True
        quick = DecoderProcess.decoded

        def decoded(own: Any, file: bytes, *arguments: Any) -> Any:
            if file != SLOW:
                return quick(own, file, *arguments)
            self.begun += 1
            *_, self.wanted = arguments
            assert self.free.wait(PATIENCE)
            self.ended += 1
            return Decoded(8, 8, "RGB", bytes(192))

        monkeypatch.setattr(DecoderProcess, "decoded", decoded)


@pytest.fixture
def slow(seen: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    seen.server.post(CHAT, messages=shown(data_url(RED)), max_tokens=1)  # the worker is there
    slow = Slow(monkeypatch)
    yield slow
    slow.free.set()
    until(lambda: slow.ended == slow.begun)


def body(*files: bytes) -> dict[str, Any]:
    return {"messages": shown(*map(data_url, files)), "max_tokens": 1}


def beginning(seen: Any) -> int:
    """How many requests have not begun yet."""
    return sum(len(connection._beginnings) for connection in seen.loop.server._connections)


def test_the_images_of_a_client_that_has_left_are_decoded_no_further(seen, slow):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(seen.server.url + CHAT, json=body(*[SLOW] * 3), timeout=httpx.Timeout(PATIENCE, read=0.5))
    until(lambda: slow.begun and not slow.wanted())
    slow.free.set()
    until(lambda: not beginning(seen))
    assert slow.begun == 1


def test_four_slow_clients_leave_a_place(seen, slow):
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(seen.server.http.post, CHAT, json=body(SLOW, SLOW)) for _ in range(4)]
        until(lambda: slow.begun == 3)
        assert seen.server.http.post(CHAT, json=body(RED), timeout=PATIENCE / 3).status_code == 200
        assert slow.begun == 3
        slow.free.set()
        assert [each.result(PATIENCE).status_code for each in asked] == [200] * 4


def test_what_was_cancelled_while_it_was_decoded_ends(seen, slow):
    prompt = {"prompt": "w1 <|vision_start|><|image_pad|><|vision_end|> w2", "multi_modal_data": {"image": [SLOW]}}
    with Client(seen.server.path) as client:
        handle = client.submit(prompt, SamplingParams(n=2))
        until(lambda: slow.begun)
        handle.cancel()
        until(lambda: not slow.wanted())
        slow.free.set()
        assert [output.finish_reason for output in handle.result(PATIENCE).outputs] == ["cancelled"] * 2


def test_what_was_left_before_its_turn_is_not_looked_at(seen, slow):
    with pytest.raises(UnwantedError):
        seen.engine.processor.inputs(ImagePrompt("no places", [b"no image"]), 99, lambda: False)
    assert slow.begun == 0
