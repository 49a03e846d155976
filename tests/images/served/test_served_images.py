"""Images over HTTP: tokens are those of `engine.submit` with the same image, and all of them are counted."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from compiled_llm.protocol.messages import ImagePrompt
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.word_processor import as_file, painted, qwen_processor
from support.server.images import data_url, shown

TOKENS = 6


def as_parts(messages: list[dict[str, Any]], *images: Any) -> list[dict[str, Any]]:
    """The messages as engines take them, with these images in the place of those."""
    rest = iter(images)
    return [
        {**message, "content": [_own(part, rest) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _own(part: dict[str, Any], images: Any) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": "image", "image": next(images)}


def expected(seen: Any, messages: list[dict[str, Any]], *images: Any) -> Any:
    """What the engine answers with the same images."""
    return seen.engine.submit(as_parts(messages, *images), greedy(TOKENS)).result(PATIENCE)


def asked(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    given = {"temperature": 0, "max_completion_tokens": TOKENS, "extra_body": {"ignore_eos": True}, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **given)


@pytest.mark.parametrize(("format", "kind"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("GIF", "gif")])
def test_a_image_has_the_engine_s_tokens_streamed_and_whole(seen, client, format, kind):
    file = as_file(painted(3, 40, 24), format)
    messages = shown(data_url(file, f"image/{kind}"), text="w7 w8 w9")
    same = expected(seen, messages, Image.open(io.BytesIO(file)).convert("RGB"))
    whole = asked(client, messages)
    assert whole.choices[0].message.content == same.text
    assert whole.usage.prompt_tokens == len(same.prompt_token_ids) > 15
    assert whole.usage.completion_tokens == TOKENS
    chunks = list(asked(client, messages, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == same.text
    assert chunks[-1].usage.prompt_tokens == len(same.prompt_token_ids)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_several_images_of_several_turns_keep_their_places(seen, client):
    one, two, three = (painted(seed, width, 16) for seed, width in ((4, 16), (5, 32), (6, 24)))
    urls = [data_url(as_file(image)) for image in (one, two, three)]
    messages = [*shown(*urls[:2]), {"role": "assistant", "content": "w11"}, *shown(urls[2], text="w12")]
    answer = asked(client, messages, n=2)
    same = expected(seen, messages, one, two, three)
    assert [choice.message.content for choice in answer.choices] == [same.text] * 2
    assert answer.usage.prompt_tokens == len(same.prompt_token_ids)


def test_token_ids_of_the_prompt_are_told(seen, client):
    image = painted(7)
    messages = shown(data_url(as_file(image)))
    same = expected(seen, messages, image)
    extra = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    assert asked(client, messages, **extra).prompt_token_ids == same.prompt_token_ids
    first = next(iter(asked(client, messages, stream=True, **extra)))
    assert first.prompt_token_ids == same.prompt_token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_responses_take_images(seen, client, stream):
    image = painted(8)
    url = data_url(as_file(image))
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "w5 w6"}]
    options = {"temperature": 0, "max_output_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    given: Any = [{"role": "user", "content": content}]
    answer = client.responses.create(model="tiny", input=given, stream=stream, **options)
    if stream:
        answer = list(answer)[-1].response
    same = expected(seen, shown(url), image)
    assert answer.output_text == same.text
    assert answer.usage.input_tokens == len(same.prompt_token_ids)


def test_a_file_below_the_folder_is_read(seen, client):
    same = expected(seen, shown("x"), Image.open(seen.media / "red.png"))
    assert asked(client, shown(f"file://{seen.media}/red.png")).choices[0].message.content == same.text


def test_a_camera_s_turn_is_followed(seen, client):
    image, exif = painted(9, 32, 16), Image.Exif()
    exif[0x0112] = 6
    file = as_file(image, "PNG", exif=exif)
    same = expected(seen, shown("x"), image.rotate(-90, expand=True))
    assert asked(client, shown(data_url(file))).choices[0].message.content == same.text


def test_a_camera_s_file_with_a_second_image_is_taken_by_its_first(seen, client):
    file = as_file(painted(12), "MPO", save_all=True, append_images=[painted(13)])
    same = expected(seen, shown("x"), Image.open(io.BytesIO(file)).convert("RGB"))
    assert asked(client, shown(data_url(file, "image/jpeg"))).choices[0].message.content == same.text


def test_data_is_known_in_any_case(seen, client):
    url = data_url(as_file(painted(14)))
    loud = url.replace("data:image/png;base64", "DATA:Image/PNG;Base64")
    answers = [asked(client, shown(each)).choices[0].message.content for each in (url, loud)]
    assert answers[0] == answers[1]


def clear(mode: str) -> Image.Image:
    image = painted(15, 40, 24).convert(mode)
    image.putalpha(Image.fromarray(np.resize(np.array([0, 120, 255], np.uint8), (24, 40))))
    return image


@pytest.mark.parametrize(
    "file",
    [
        as_file(clear("RGBA")),
        as_file(clear("LA")),
        as_file(clear("RGBA"), "WEBP", lossless=True),
        as_file(painted(16, 40, 24).quantize(16), transparency=3),
        as_file(Image.new("RGB", (24, 16), (9, 9, 9)), transparency=(9, 9, 9)),
        as_file(painted(16, 40, 24).quantize(16), "GIF", transparency=3),
    ],
    ids=["RGBA", "LA", "WebP", "palette", "RGB with a colour", "GIF"],
)
def test_what_is_transparent_has_huggingface_s_pixels(seen, file):
    text = "w5 <|vision_start|><|image_pad|><|vision_end|> w6"
    theirs = qwen_processor()(text=[text], images=[Image.open(io.BytesIO(file))], return_tensors="pt")
    ours = seen.engine.processor.inputs(ImagePrompt(text, [file]), 99, lambda: True)
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    assert torch.equal(ours["input_ids"], theirs["input_ids"])


def test_what_comes_again_is_counted(seen, client):
    def counts() -> list[int]:
        text = seen.server.http.get("/metrics").text
        names = [f"compiled_llm_mm_cache_{name}_total " for name in ("queries", "hits")]
        return [int(float(line.split()[1])) for name in names for line in text.splitlines() if line.startswith(name)]

    url = data_url(as_file(painted(10)))
    asked(client, shown(url))
    queries, hits = counts()
    asked(client, [{"role": "system", "content": "w9"}, *shown(url)])
    assert counts() == [queries + 1, hits + 1]
    assert seen.engine.stats().encoder_cache.nbytes > 0


def test_a_body_with_images_may_be_longer_than_one_of_text(seen):
    body = json.dumps({"messages": shown(data_url(as_file(painted(11)))), "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    for size, status in ((2**23 + 1, 200), (2**25 + 1, 413)):
        response = seen.server.http.post("/v1/chat/completions", content=body.ljust(size), headers=headers)
        assert response.status_code == status, response.text
    assert response.json()["error"]["message"] == "the body can have 33,554,432 bytes (--max-body-bytes)"


def test_text_alone_goes_as_ever(seen, client):
    messages = [{"role": "user", "content": "w5 w6"}]
    same = expected(seen, messages)
    answer = asked(client, messages)
    assert answer.choices[0].message.content == same.text
    assert answer.usage.prompt_tokens == len(same.prompt_token_ids)
