"""The memory that images take is what the page on security says, and it is given back."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import pytest

from compiled_llm.server.defaults import MAX_REQUEST_PIXELS, MOST_IMAGE_PIXELS
from support.imports import CHECKOUT
from support.server.engine_processes import until
from support.server.pictures import data_url, png, shown

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
def test_the_images_of_a_request_take_the_memory_of_one_and_give_it_back(seen):
    file = png(SIDE, SIDE, zlib.compress(bytes((3 * SIDE + 1) * SIDE), 9))
    pixels, given_back = SIDE * SIDE, 2**25
    seen.server.post(CHAT, messages=shown(data_url(file)), max_tokens=1)  # what stays once has come
    until(lambda: figure("VmRSS") < figure("VmHWM"))
    before = figure("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    response = seen.server.http.post(CHAT, json={"messages": shown(*[data_url(file)] * COUNT), "max_tokens": 1})
    assert response.status_code in (200, 400), response.text  # they may have more tokens than there are positions
    assert figure("VmHWM") - before < bytes_a_pixel() * pixels + given_back
    until(lambda: figure("VmRSS") - before < given_back)


def test_the_page_has_the_bounds():
    from compiled_llm.server.images import decoder_process, header, turns  # a part that can be taken out

    text = page()
    for bound in (MAX_REQUEST_PIXELS, MOST_IMAGE_PIXELS, turns._LARGE):
        assert f"{bound:,} pixels" in text
    assert f"{decoder_process._PIXELS_A_SECOND:,} pixels of its header" in text
    assert f"{decoder_process._EACH} bytes for each of these pixels" in text
    assert f"before the size in a JPEG | {header._MOST_MARKERS:,} |" in text
