"""`--image` of `generate`, `chat` and `chat --server`: tokens are those of HuggingFace's `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from support.commands.command_line import invoke
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.seeing_folder import seeing_folder
from support.server.engine_processes import until
from support.server.images import data_url, shown
from support.server.running_servers import serving

RUNNING = ("--mode", "eager", "--device", "cpu", "--greedy", "--max-new-tokens", "5", "--quiet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return seeing_folder(tmp_path_factory.mktemp("seeing") / "tiny-eyes")


@pytest.fixture(scope="module")
def answer(folder: Path) -> str:
    """HuggingFace's answer to the image with a text."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    processor: Any = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image", "image": Image.open(folder / "a.png")}, {"type": "text", "text": "w5 w6"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(tokens, skip_special_tokens=True))


def test_generate_and_chat_show_a_image(folder, answer):
    image = ("--image", str(folder / "a.png"))
    done = invoke("generate", "w5 w6", "--model", str(folder), *image, *RUNNING)
    assert done.stdout.strip() == answer, done.stderr
    lines = f"w5 w6\n/retry\n/clear\n/image {folder}/a.png\nw5 w6\n/image /none.png\n"
    done = invoke("chat", str(folder), *image, *RUNNING, stdin=lines)
    first, again, *_, last = [line for line in done.stdout.splitlines() if line.startswith("w")]
    assert (first, again, last) == (answer, answer, answer), done.stderr
    assert "/image /none.png: there is no such file" in done.stderr


def test_a_chat_over_http_shows_a_image(seen):
    image = seen.media / "red.png"
    part = {"type": "image", "image": str(image)}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "w5 w6"}]}]
    same = seen.engine.submit(messages, greedy(5)).result(PATIENCE)
    options = ("--image", str(image), "--greedy", "--max-new-tokens", "5", "--quiet")
    done = invoke("chat", "--server", seen.server.url, *options, stdin="w5 w6\n")
    assert done.stdout.strip() == same.text, done.stderr


@pytest.mark.whole
def test_serve_loads_a_model_with_its_eyes(folder, answer):
    body = {"messages": shown(data_url((folder / "a.png").read_bytes())), "max_tokens": 5, "temperature": 0}
    options = ("--mode", "eager", "--device", "cpu", "--limit-mm-per-prompt", '{"image": 1}')
    options = (*options, "--mm-encoder-cache-gb", "0.5")
    with serving(folder, *options) as (_, url), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
        answered = http.post("/v1/chat/completions", json=body).json()
        assert answered["choices"][0]["message"]["content"] == answer
        assert answered["usage"]["prompt_tokens"] == 9
        two = {"messages": [*body["messages"], {"role": "assistant", "content": "w1"}, *body["messages"]]}
        assert http.post("/v1/chat/completions", json=two).status_code == 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "a", "--image", "/none.png"), "--image /none.png: there is no such file"),
        (("chat", "--server", "/none.sock", "--image", "a.png"), "--image: over the socket /none.sock"),
        (("chat", "TEXT", "--image", "a.png"), "--image: TEXT reads text alone"),
    ],
)
def test_what_cannot_be_shown_is_refused(folder, arguments, words, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    from support.engine.text_tokenizers import byte_level
    from support.tiny_models import tiny_qwen3

    if "TEXT" in arguments:
        tiny_qwen3().save_pretrained(tmp_path)
        byte_level().save_pretrained(tmp_path)
    done = invoke(*(argument.replace("TEXT", str(tmp_path)) for argument in arguments), stdin="w1\n")
    assert done.exit_code == 2 or done.exit_code == 1
    assert words.replace("TEXT", str(tmp_path)) in done.stderr
