"""The memory that images take is what the page on security says, and it is given back."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import pytest

from compiled_llm.server.defaults import MAX_KEPT_OF_IMAGES, MAX_REQUEST_PIXELS, MOST_IMAGE_PIXELS
from support.imports import CHECKOUT
from support.server.engine_processes import until
from support.server.images import data_url, png, shown

CHAT = "/v1/chat/completions"
SIDE = 2048
COUNT = 8
STATUS = Path("/proc/self/status")


def figure(name: str) -> int:
    """Bytes that this process has, or has had at most."""
    found = re.search(rf"{name}:\s*(\d+) kB", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


def page() -> str:
    return (CHECKOUT / "docs/security.md").read_text()


def bytes_a_pixel() -> int:
    found = re.search(r"(\d+) bytes for each pixel in the engine process", page())
    assert found is not None, "the page says it"
    return int(found[1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system counts no peak anew")
def test_the_images_of_a_request_take_the_memory_of_one_and_give_it_back(seen, monkeypatch):
    from compiled_llm.server.images import reader

    monkeypatch.setattr(reader, "image_tokens", lambda *arguments: None)  # else they are too many to be decoded
    file = png(SIDE, SIDE, zlib.compress(bytes((3 * SIDE + 1) * SIDE), 9))
    pixels, given_back = SIDE * SIDE, 2**25
    seen.server.post(CHAT, messages=shown(data_url(file)), max_tokens=1)  # what stays once has come
    until(lambda: figure("VmRSS") < figure("VmHWM"))
    before = figure("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    response = seen.server.http.post(CHAT, json={"messages": shown(*[data_url(file)] * COUNT), "max_tokens": 1})
    assert "tokens leave no room for an answer" in response.text
    assert figure("VmHWM") - before < bytes_a_pixel() * pixels + given_back
    until(lambda: figure("VmRSS") - before < given_back)


def test_the_page_has_the_bounds():
    from compiled_llm.server.images import decoder_process, header, turns  # a part that can be taken out

    text = page()
    assert MAX_KEPT_OF_IMAGES == 4 * 2**30
    assert "4 GiB" in text
    for bound in (MAX_REQUEST_PIXELS, MOST_IMAGE_PIXELS, turns._LARGE):
        assert f"{bound:,} pixels" in text
    assert f"{decoder_process._PIXELS_A_SECOND:,} pixels of its header" in text
    assert f"{decoder_process._EACH} bytes for each of these pixels" in text
    assert f"before the size in a JPEG | {header._MOST_MARKERS:,} |" in text


def test_images_of_more_tokens_than_fit_are_refused_before_one_is_decoded(seen, monkeypatch):
    from compiled_llm.server.images.decoder_process import DecoderProcess

    def decoded(*arguments: object) -> None:
        raise AssertionError("an image is decoded")

    monkeypatch.setattr(DecoderProcess, "decoded", decoded)
    url = data_url(png(SIDE, SIDE))
    response = seen.server.http.post(CHAT, json={"messages": shown(*[url] * COUNT), "max_tokens": 1})
    assert response.status_code == 400
    said = "its images are 512 tokens, and it can have 255; send fewer, or smaller ones"
    assert response.json()["error"]["message"] == f"messages: {said}"
