"""Forty kinds of hostile images: each is refused with a sentence and its field, and a stream beside it goes on."""

from __future__ import annotations

import base64
import ctypes
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.huggingface.word_processor import as_file, painted
from support.server.images import chunk, data_url, png, shown

CHAT = "/v1/chat/completions"
RED = as_file(painted(1))
URL = "messages[0].content[0].image_url.url"
MOST_GROWTH = 2**26  # bytes, of this process, with an engine and an API server in it
AVIF = b"\0\0\0\x1cftypavif\0\0\0\0avifmif1"
VP8X = b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0"
NOISE = as_file(painted(5, 400, 400))


def frames(format: str) -> bytes:
    """The file of an animation."""
    file = io.BytesIO()
    painted(1).save(file, format, save_all=True, append_images=[painted(2)], duration=9)
    return file.getvalue()


def larger_than_it_says() -> bytes:
    """A JPEG with two sizes, the first of which is small."""
    file = as_file(painted(3, 16, 16), "JPEG")
    start = file.index(b"\xff\xc0")
    length = 2 + int.from_bytes(file[start + 2 : start + 4], "big")
    second = bytearray(file[start : start + length])
    second[5:9] = b"\xff\xdc\xff\xdc"
    return file[: start + length] + bytes(second) + file[start + length :]


def padded(piece: bytes) -> bytes:
    """A JPEG whose size comes after half a megabyte of pieces."""
    file = as_file(painted(1), "JPEG")
    return file[:2] + piece * (2**19 // len(piece)) + file[2:]


def text_bomb() -> bytes:
    """A PNG with a text that is a thousand times longer than its file."""
    import zlib

    return png(8, 8, zlib.compress(bytes(8 * 25)), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26), 9)))


def file(content: bytes, kind: str = "image/png") -> Callable[[Path], Any]:
    return lambda media: shown(data_url(content, kind))


def at(url: str) -> Callable[[Path], Any]:
    return lambda media: shown(url.replace("MEDIA", str(media)))


def part(given: dict[str, Any], role: str = "user") -> Callable[[Path], Any]:
    return lambda media: [{"role": role, "content": [given, {"type": "text", "text": "w1"}]}]


KINDS: dict[str, tuple[Callable[[Path], Any], int, str, str]] = {
    "SVG by its type": (file(b"<svg/>", "image/svg+xml"), 400, URL, "image/svg"),
    "SVG that is called PNG": (file(b"<svg xmlns='a'/>"), 400, URL, "SVG"),
    "SVG behind a declaration": (file(b"\n <?xml version='1.0'?><svg/>"), 400, URL, "SVG"),
    "an animated GIF": (file(frames("GIF"), "image/gif"), 400, URL, "animat"),
    "an animated PNG": (file(frames("PNG")), 400, URL, "animat"),
    "an animated WebP": (file(frames("WEBP"), "image/webp"), 400, URL, "animat"),
    "a PNG cut in its header": (file(RED[:20]), 400, URL, "cut"),
    "a PNG cut in its pixels": (file(NOISE[:9000]), 400, URL, "damaged"),
    "a PNG of nothing": (file(png(8, 8)), 400, URL, "damaged"),
    "a PNG whose pixels are no zlib": (file(png(8, 8, b"\xff" * 50)), 400, URL, "damaged"),
    "a JPEG cut in its header": (file(as_file(painted(1), "JPEG")[:30]), 400, URL, "cut"),
    "a JPEG cut in its pixels": (file(as_file(painted(1, 200, 200), "JPEG")[:9000]), 400, URL, "damaged"),
    "a JPEG without a size": (file(b"\xff\xd8\xff\xda\0\2" + bytes(99)), 400, URL, "damaged"),
    "a JPEG of padding": (file(padded(b"\xff")), 400, URL, "padding"),
    "a JPEG of empty segments": (file(padded(b"\xff\xfe\0\2")), 400, URL, "markers"),
    "a JPEG of two sizes": (file(larger_than_it_says()), 400, URL, ""),
    "a WebP cut": (file(as_file(painted(1), "WEBP")[:60], "image/webp"), 400, URL, "damaged"),
    "a GIF cut": (file(as_file(painted(1), "GIF")[:12], "image/gif"), 400, URL, "damaged"),
    "a PNG with a text bomb": (file(text_bomb()), 400, URL, "damaged"),
    "HTML by its type": (file(RED, "text/html"), 400, URL, "text/html"),
    "a PDF": (file(b"%PDF-1.7 ..."), 400, URL, "PDF"),
    "a BMP": (file(as_file(painted(1), "BMP")), 400, URL, "BMP"),
    "a TIFF": (file(as_file(painted(1), "TIFF")), 400, URL, "TIFF"),
    "an AVIF": (file(AVIF), 400, URL, "AVIF"),
    "noise": (file(os.urandom(3000)), 400, URL, "no image"),
    "nothing": (file(b""), 400, URL, "no image"),
    "a PNG without pixels": (file(png(0, 10)), 400, URL, "no pixels"),
    "10^9 pixels as PNG": (file(png(50_000, 20_000)), 413, URL, "50,000 x 20,000"),
    "10^18 pixels as PNG": (file(png(2**31 - 1, 2**31 - 1)), 413, URL, "at most"),
    "10^9 pixels as JPEG": (file(b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff" + bytes(9)), 413, URL, "65,535"),
    "10^8 pixels as WebP": (file(VP8X + bytes(9)), 413, URL, "16,384"),
    "10^9 pixels as GIF": (file(b"GIF89a\xff\xff\xff\xff" + bytes(9)), 413, URL, "65,535"),
    "images of too many pixels together": (
        lambda media: shown(*[data_url(png(8192, 4096))] * 9),
        *(413, "messages[0].content[8].image_url.url", "up to this one have 301,989,888 pixels"),
    ),
    "a file of too many bytes": (file(RED + bytes(2**21)), 413, URL, "bytes"),
    "data that is no base64": (at("data:image/png;base64,?#~"), 400, URL, "base64"),
    "data without base64": (at("data:image/png,abc"), 400, URL, "base64"),
    "a file outside": (at("file://MEDIA/../outside.png"), 400, URL, "below"),
    "a link to outside": (at("file://MEDIA/link.png"), 400, URL, "below"),
    "a file that there is not": (at("file://MEDIA/none.png"), 400, URL, "below"),
    "the folder itself": (at("file://MEDIA"), 400, URL, "below"),
    "a pipe": (at("file://MEDIA/pipe"), 400, URL, "below"),
    "a file of another machine": (at("file://other.example/etc/passwd"), 400, URL, "below"),
    "a file with a zero": (at("file://MEDIA/red.png%00"), 400, URL, "below"),
    "a path alone": (at("/etc/passwd"), 400, URL, "address"),
    "an address of this machine": (at("http://127.0.0.1:1/a.png"), 400, URL, "private"),
    "a name of this machine": (at("http://localhost:1/a.png"), 400, URL, "private"),
    "this machine in another notation": (at("http://[::ffff:127.0.0.1]:1/a.png"), 400, URL, "does not name"),
    "a host that is not allowed": (at("http://169.254.169.254/latest/meta-data"), 400, URL, "does not name"),
    "an address with a password": (at("http://a:b@127.0.0.1:1/a.png"), 400, URL, "user"),
    "an address with a line": (at("http://127.0.0.1:1/a\r\nHost: b"), 400, URL, "HTTP"),
    "another protocol": (at("ftp://127.0.0.1/a.png"), 400, URL, "address"),
    "a long address": (at("http://127.0.0.1/" + "a" * 5000), 400, URL, "characters"),
    "10,000 images": (lambda media: shown(*["data:,"] * 10_000), 400, "", "more than 65,536"),
    "5,000 images": (lambda media: shown(*["data:,"] * 5000), 400, "messages[0].content[16]", "5,000"),
    "17 images": (lambda media: shown(*[data_url(RED)] * 17), 400, "messages[0].content[16]", "17"),
    "a video": (part({"type": "video_url", "video_url": {"url": "a"}}), 400, "messages[0].content[0].type", "videos"),
    "sound": (part({"type": "input_audio", "input_audio": {}}), 400, "messages[0].content[0].type", "sound"),
    "a file by its number": (part({"type": "file", "file": {}}), 400, "messages[0].content[0].type", "files"),
    "a part of no kind": (part({"type": "smell"}), 400, "messages[0].content[0].type", "parts are"),
    "an image without a place": (part({"type": "image_url", "image_url": {}}), 400, URL, "missing"),
    "an image of the system's": (part(shown("data:,")[0]["content"][0], "system"), 400, "messages[0].content", "user"),
    "a text with the token of images": (
        lambda media: shown(data_url(RED), text="w1 <|image_pad|>"),
        *(400, "messages", "2 places"),
    ),
}


def rss() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def attacked(seen) -> Iterator[Any]:
    (seen.media / "link.png").symlink_to(seen.media.parent / "outside.png")
    os.mkfifo(seen.media / "pipe")
    seen.server.post(CHAT, messages=shown(data_url(RED)), max_tokens=1)  # the processor and the worker are there
    before = rss()
    yield seen
    assert rss() - before < MOST_GROWTH


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_image_is_refused_by_its_field_and_streams_go_on(attacked, kind):
    made, status, param, word = KINDS[kind]
    text = [{"role": "user", "content": "w5"}]
    stream = attacked.server.events(CHAT, messages=text, max_tokens=5, ignore_eos=True)
    next(stream)
    response = attacked.server.http.post(CHAT, json={"messages": made(attacked.media), "max_tokens": 1})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param), error
    assert error["message"].startswith(error["param"] or "the body")
    assert word in error["message"]
    assert not re.search(r"Traceback|\.py\b|/(tmp|root|home|usr)/", response.text)
    assert [*stream]


@pytest.mark.parametrize("field", [{"prompt_logprobs": 1}, {"truncate_prompt_tokens": 9}])
def test_fields_that_do_not_go_with_images_are_refused(attacked, field):
    response = attacked.server.http.post(CHAT, json={"messages": shown(data_url(RED)), **field})
    assert (response.status_code, response.json()["error"]["param"]) == (400, *field)


def test_images_are_not_tokenized_apart(attacked):
    response = attacked.server.http.post("/tokenize", json={"messages": shown(data_url(RED))})
    assert (response.status_code, response.json()["error"]["param"]) == (400, URL)


def test_responses_name_their_own_fields(attacked):
    url = "data:image/png;base64," + base64.b64encode(RED[:60]).decode()
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "w1"}, {"type": "input_image", "image_url": url}],
    }
    response = attacked.server.http.post("/v1/responses", json={"input": [item]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[0].content[1].image_url"
