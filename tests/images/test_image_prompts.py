"""Images as users give them: in messages, in vLLM's dictionaries, as Pillow's, as files and as bytes."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, greedy, wrapped
from support.huggingface.vision import IMAGE, make
from support.huggingface.word_processor import as_file, painted, qwen_processor
from support.images import SampleImage, prompt_of, seeing

CAT, DOG = painted(1), painted(2, 32, 32)
TEXT = {"type": "text", "text": " w5 w6 w7"}


def message(*images: Any) -> Any:
    return [{"role": "user", "content": [*({"type": "image", "image": image} for image in images), TEXT]}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return seeing("Qwen3VL")


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, processor=qwen_processor()) as running:
        yield running


def huggingfaces(messages: Any, tokens: int = 8) -> list[int]:
    """What ``generate`` answers to what the processor makes of messages."""
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = qwen_processor().apply_chat_template(messages, add_generation_prompt=True, **options)
    sampling: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
    found: list[int] = make("Qwen3VL").generate(**inputs, **sampling)[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[operator]
    return found


def answered(engine: Engine, prompt: Any) -> list[int]:
    return list(engine.submit(prompt, greedy(8)).result(PATIENCE).outputs[0].token_ids)


def test_messages_with_images_have_generates_tokens(engine, tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(as_file(CAT))
    expected = huggingfaces(message(CAT, DOG))
    for first in (CAT, path, str(path), path.read_bytes(), as_file(CAT, "WEBP", lossless=True)):
        assert answered(engine, message(first, DOG)) == expected
    (output,) = engine.generate([message(CAT)], greedy(4))
    assert output.outputs[0].text is not None


def test_a_image_is_turned_as_its_camera_says(engine):
    sideways, exif = CAT.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    assert answered(engine, message(as_file(sideways, exif=exif))) == huggingfaces(message(CAT))


def test_vllms_dictionaries(engine):
    text = "w5 <|vision_start|><|image_pad|><|vision_end|> w6 <|vision_start|><|image_pad|><|vision_end|> w7"
    images = {"image": [CAT, DOG]}
    expected = answered(engine, {"prompt": text, "multi_modal_data": images})
    inputs = qwen_processor()(text=[text], images=[CAT, DOG], return_tensors="pt")
    assert answered(engine, inputs) == expected
    each = qwen_processor().tokenizer(text)["input_ids"]
    assert each.count(IMAGE) == 2
    for ids in (each, inputs["input_ids"][0].tolist()):
        assert answered(engine, {"prompt_token_ids": ids, "multi_modal_data": images}) == expected


def header(width: int, height: int) -> bytes:
    """A PNG that ends after its sizes."""
    sizes = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(sizes)) + b"IHDR" + sizes + struct.pack(">I", zlib.crc32(b"IHDR" + sizes))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1 << 20) + b"IDAT"


FRAMES = as_file(CAT, "WEBP", save_all=True, append_images=[painted(3)])


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (header(9000, 9000), "9000 x 9000 pixels, and at most 67108864 are decoded"),
        (header(1 << 15, 1 << 15), "cannot be read .*exceeds limit"),
        (as_file(painted(1, 64, 64))[:200], "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG, JPEG, WEBP"),
        (as_file(CAT, "GIF"), "none of PNG, JPEG, WEBP"),
        (FRAMES, "2 frames, and animations are not served"),
        (b"", "none of PNG, JPEG, WEBP"),
        ("no such file.png", "cannot be read"),
        ("https://example.com/cat.png", "fetches no images from addresses"),
        ("file:///etc/passwd", "fetches no images from addresses"),
        ("data:image/png;base64,AAAA", "fetches no images from addresses"),
        ("DATA:image/png;base64,AAAA", "fetches no images from addresses"),
        (None, "an image is a NoneType; give an Image of Pillow's, or the path or bytes of a file"),
    ],
    ids=range(13),
)
def test_a_image_that_cannot_be_had(engine, image, said):
    with pytest.raises(ValueError, match=f"prompt: .*{said}"):
        engine.submit(message(image))


def part(**given: Any) -> Any:
    return [{"role": "user", "content": [given]}]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (part(type="video", video="cat.mp4"), "a part of type 'video'; videos are not served"),
        (part(type="input_audio", input_audio={}), "a part of type 'input_audio'; sound is not served"),
        (part(type="image"), r"a part of type 'image' .*images are \{'type': 'image', 'image': "),
        (
            part(type="image_url", image_url={"url": "x"}),
            r"a part of type 'image_url' .*images are \{'type': 'image'",
        ),
        ({"prompt": "w1", "multi_modal_data": {"audio": 1}}, "multi_modal_data has 'audio'; images alone"),
        ({"prompt": "w1", "multi_modal_data": {"image": CAT}}, "the processor has failed|none of its tokens is one"),
        (
            {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": CAT}},
            "have 0 tokens 120 for 1 images|for 1 pic",
        ),
        (
            {**prompt_of("Qwen3VL", 5, SampleImage(1), 7), "pixel_values_videos": torch.ones(1)},
            "videos and sound are not",
        ),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "pixel_values": torch.ones(1)}, "give those of one prompt"),
        ({**prompt_of("Qwen3VL", 5, SampleImage(1), 7), "attention_mask": torch.zeros(1, 9)}, "without padding"),
        (prompt_of("Qwen3VL", 5, SampleImage(1))["input_ids"][:, :-1], None),
    ],
    ids=range(11),
)
def test_a_prompt_that_cannot_be_had(engine, prompt, said):
    if said is None:
        given = prompt_of("Qwen3VL", 5, SampleImage(1))
        prompt = {**given, "input_ids": prompt, **{name: given[name][:, :-1] for name in ("mm_token_type_ids",)}}
        prompt, said = (
            {name: value for name, value in prompt.items() if name != "attention_mask"},
            "ends with an image",
        )
    with pytest.raises(ValueError, match=f"prompt: .*({said})"):
        engine.submit(prompt)
    assert engine.stats().waiting == 0


def test_options_that_go_with_text_alone(engine, model):
    given = prompt_of("Qwen3VL", 5, SampleImage(1), 7)
    with pytest.raises(ValueError, match="prompt_logprobs: there are none of a prompt with images"):
        engine.submit(given, SamplingParams(prompt_logprobs=1))
    with pytest.raises(ValueError, match="hidden_states, emitted, pooled: there are none of a prompt with images"):
        engine.submit(given, hidden_states=[0])
    invariant = seeing("Qwen3VL", mode="compile", batch_invariant=True)
    with Engine(invariant) as other, pytest.raises(ValueError, match="batch_invariant=True; give text"):
        other.submit(given)


def test_what_an_engine_lacks(model):
    with Engine(model) as engine, pytest.raises(ValueError, match="the engine has no processor; give compiled_llm"):
        engine.submit(message(CAT))
    processor = qwen_processor()
    processor.image_token_id = 7
    with (
        Engine(model, processor=processor) as engine,
        pytest.raises(ValueError, match="tokens 7 to the engine's processor and 120 to its"),
    ):
        engine.submit(message(CAT))
    with Engine(wrapped()) as engine, pytest.raises(ValueError, match="Qwen3ForCausalLM reads text alone"):
        engine.submit(message(CAT))


@pytest.mark.whole
def test_text_imports_no_decoder_and_no_processor():
    code = (
        "import sys, compiled_llm; from support.engine.tiny_engines import wrapped, greedy\n"
        "with compiled_llm.Engine(wrapped()) as engine: engine.generate([[5, 6]], greedy(3))\n"
        "print([name for name in sys.modules if name == 'PIL.PngImagePlugin' or 'image_processing' in name "
        "or name.startswith('compiled_llm.engine.images')])"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert compiled_llm.Engine is Engine
