"""Prompts with an image: first tokens, tokens after it, and what text streams beside images feel.

python tools/bench/images.py --model qwen3-vl-4b
python tools/bench/images.py --model tiny --side 8 --text 20 --seconds 2 --mode eager --device cpu

HuggingFace's ``model(...)``, a wrapped ``generate`` and an engine answer the same prompts in turns. Weights and pixel
values are random; these are made where the model is, and an engine has them on the host, too, where a processor
leaves them. Of an engine and of ``generate``, once steps read images, and once HuggingFace's forward computes
prompts. Each first token of an engine is that of an image which it has not seen, unless a line says "again".
"""

from __future__ import annotations

import json as jsons
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Annotated, Any, NamedTuple

import torch
import typer
from common import DeviceName, Json
from torch import Tensor
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import compiled_llm
from compiled_llm.commands.loading.load import device_of, dtype_of
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams

STREAMS = 16


class Sizes(NamedTuple):
    """The two halves of a config of Qwen3-VL."""

    text: dict[str, Any]
    vision: dict[str, Any]
    axes: list[int]
    image: int  # the id of an image's tokens; those after it begin and end one


SIZES = {
    "qwen3-vl-4b": Sizes(
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        [24, 20, 20],
        151653,
    ),
    "tiny": Sizes(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 320,
        },
        {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        [2, 3, 3],
        310,
    ),
}


def build(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Random weights that never end an answer."""
    sizes = SIZES[name]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sizes.axes, "mrope_interleaved": True}
    rest: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
    config = Qwen3VLConfig(
        text_config={**sizes.text, **rest, "max_position_embeddings": 32768, "rope_parameters": rope},
        vision_config=sizes.vision,
        image_token_id=sizes.image,
        vision_start_token_id=sizes.image + 1,
        vision_end_token_id=sizes.image + 2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    with device:
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


class Prompts:
    """What a processor makes of an image in the middle of text, and text of that length."""

    def __init__(self, model: Any, side: int, text: int) -> None:
        """An image is a square of so many patches a side."""
        self._model, self._side, self._text = model, side, text
        self._generator = torch.Generator(model.device).manual_seed(7)

    @property
    def length(self) -> int:
        return int(self.of_image()["input_ids"].shape[1])

    def of_image(self, where: Any = None) -> dict[str, Tensor]:
        """Return the inputs of an image that nobody has seen, and of text before and after it; where the model is."""
        model, config = self._model, self._model.config
        vision, image = config.vision_config, config.image_token_id
        size = 3 * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(self._side**2, size, device=model.device, generator=self._generator)
        tokens = self._side**2 // vision.spatial_merge_size**2
        words = list(range(5, 5 + self._text))
        ids = torch.tensor([[*words[:5], image + 1, *[image] * tokens, image + 2, *words[5:]]])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == image).long(),
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, self._side, self._side]]),
        }
        return {name: tensor.to(model.device if where is None else where) for name, tensor in inputs.items()}

    def of_text(self) -> dict[str, Tensor]:
        device = self._model.device
        ids = torch.randint(5, 300, (1, self.length), device=device, generator=self._generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Stopwatch:
    """Times calls, each after the device is done with what came before."""

    def __init__(self, device: torch.device, runs: int) -> None:
        self.found: dict[str, float] = {}
        self._device, self._runs = device, runs

    def ms(self, name: str, prepare: Callable[[], Any], call: Callable[[Any], Any], per: int = 1) -> float:
        """Note and print the median of a call, of what was prepared for it; the first two are not counted."""
        times = []
        for _ in range(self._runs + 2):
            given = prepare()
            self._wait()
            began = time.perf_counter()
            call(given)
            self._wait()
            times.append((time.perf_counter() - began) * 1e3 / per)
        self.note(name, statistics.median(times[2:]), f" (best {min(times[2:]):.2f})")
        return self.found[name]

    def note(self, name: str, ms: float, more: str = "") -> None:
        self.found[name] = ms
        print(f"{name:80s} {ms:8.2f} ms{more}", flush=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            # Not for the device: CUDA refuses that while a thread captures, as an engine's does.
            torch.cuda.current_stream(self._device).synchronize()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def gaps_beside(engine: Engine, prompts: Prompts, seconds: float, every: float | None) -> list[float]:
    """Return the gaps between tokens of text streams, in ms, with a new image so often."""
    ends = time.perf_counter() + seconds
    gaps: list[list[float]] = [[] for _ in range(STREAMS)]

    def follow(number: int) -> None:
        handle, before = engine.submit([7 + number] * 64, greedy(4096)), None
        for _ in handle:
            now = time.perf_counter()
            gaps[number] += [] if before is None else [(now - before) * 1e3]
            before = now
            if now > ends:
                handle.cancel()
                return

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    while every is not None and time.perf_counter() + every < ends:
        time.sleep(every)
        engine.submit(prompts.of_image("cpu"), greedy(16))
    for thread in threads:
        thread.join()
    return sorted(gap for own in gaps for gap in own)


def measure_parts(model: Any, prompts: Prompts, watch: Stopwatch) -> None:
    """HuggingFace's own forward, before the model is wrapped."""
    encoder = model.model.visual
    with torch.no_grad():
        watch.ms(
            "HuggingFace: encoder alone",
            prompts.of_image,
            lambda given: encoder(given["pixel_values"].to(model.dtype), grid_thw=given["image_grid_thw"]),
        )
        forward = lambda given: model(**given, logits_to_keep=1)  # noqa: E731
        watch.ms("HuggingFace: model(...), image", prompts.of_image, forward)
        watch.ms("HuggingFace: model(...), text of that length", prompts.of_text, forward)


def measure_generate(model: Any, prompts: Prompts, watch: Stopwatch, new: int, who: str) -> None:
    def generate(tokens: int) -> Callable[[Any], Any]:
        return lambda given: model.generate(**given, max_new_tokens=tokens, do_sample=False)

    for name, given in (("text of that length", prompts.of_text), ("image", prompts.of_image)):
        first = watch.ms(f"{who}: first token, {name}", given, generate(1))
        whole = watch.ms(f"{who}: {new + 1} tokens, {name}", given, generate(new + 1))
        watch.note(f"{who}: a token after it, {name}", (whole - first) / new)


def measure_engine(engine: Engine, prompts: Prompts, watch: Stopwatch, new: int, name: str) -> None:
    def ask(tokens: int) -> Callable[[Any], Any]:
        return lambda given: engine.submit(given, greedy(tokens)).result()

    def text() -> list[int]:
        ids: list[int] = prompts.of_text()["input_ids"][0].tolist()
        return ids

    seen, fresh = prompts.of_image("cpu"), count(5)

    def with_other_text() -> dict[str, Tensor]:
        """Return the same image after a text that begins with a token of its own."""
        ids = seen["input_ids"].clone()
        ids[0, 0] = next(fresh)
        return {**seen, "input_ids": ids}

    ask(1)(seen)
    for what, given in (("text of that length", text), ("image", lambda: prompts.of_image("cpu"))):
        first = watch.ms(f"{name}: first token, {what}", given, ask(1))
        whole = watch.ms(f"{name}: {new + 1} tokens, {what}", given, ask(new + 1))
        watch.note(f"{name}: a token after it, {what}", (whole - first) / new)
    watch.ms(f"{name}: first token, pixels on the device", prompts.of_image, ask(1))
    again = text()
    watch.ms(f"{name}: first token, the same text of that length again", lambda: again, ask(1))
    watch.ms(f"{name}: first token, the same image and text again", lambda: seen, ask(1))
    watch.ms(f"{name}: first token, the same image, other text before", with_other_text, ask(1))


def measure_streams(
    engine: Engine, prompts: Prompts, watch: Stopwatch, seconds: float, every: float, name: str
) -> None:
    gaps_beside(engine, prompts, min(2.0, seconds), None)  # captures what is missed
    gaps_beside(engine, prompts, min(2.0, seconds), min(every, seconds / 3))  # and beside images
    beside = f"{name}: {STREAMS} streams"
    for what, apart in ((f"{beside} alone", None), (f"{beside}, an image each {every} s", every)):
        gaps = gaps_beside(engine, prompts, seconds, apart)
        p50, p99, worst = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)], gaps[-1]
        watch.note(f"{what}: gap, p50", p50)
        watch.note(f"{what}: gap, p99", p99, f" (at worst {worst:.2f}, of {len(gaps):,})")


def main(
    model: Annotated[str, typer.Option(help=f"Random weights in the shape of {', '.join(SIZES)}.")] = "qwen3-vl-4b",
    side: Annotated[int, typer.Option(help="Patches of 16 pixels along a side of the square image; even.")] = 64,
    text: Annotated[int, typer.Option(help="Tokens of text.")] = 300,
    new: Annotated[int, typer.Option(help="Tokens after the first.")] = 64,
    seconds: Annotated[float, typer.Option(help="How long streams are followed.")] = 8.0,
    every: Annotated[float, typer.Option(help="Seconds between images beside streams.")] = 1.0,
    runs: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 5,
    only: Annotated[str, typer.Option(help="parts, generate, engine and streams, comma-separated.")] = (
        "parts,engine,streams,generate"
    ),
    mode: Annotated[str, typer.Option(help="Of wrap.")] = "cuda-graphs",
    device: DeviceName = "auto",
    json: Json = None,
) -> None:
    """Measure prompts with one image."""
    if model not in SIZES:
        raise SystemExit(f"--model {model}: give one of {', '.join(SIZES)}")
    parts: Sequence[str] = only.split(",")
    where = device_of(device)
    plain, watch = build(model, dtype_of("auto", where), where), Stopwatch(where, runs)
    prompts = Prompts(plain, side, text)
    print(f"prompt of {prompts.length} tokens, {side * side // 4} of them the image's", flush=True)
    if "parts" in parts:
        measure_parts(plain, prompts, watch)
    tokens = 4 * STREAMS * 512 + 16 * prompts.length
    options: dict[str, Any] = {"mode": mode, "max_batch_size": STREAMS + 2, "kv_memory": f"{tokens} tokens"}
    wrapped: Any = compiled_llm.wrap(plain, images_in_steps=False, **options)
    for name, in_steps in (("engine", True), ("engine, HuggingFace's prompts", False)):
        with Engine(wrapped, max_num_seqs=STREAMS + 2, images_in_steps=in_steps) as engine:
            if "engine" in parts:
                measure_engine(engine, prompts, watch, new, name)
            if "streams" in parts:
                measure_streams(engine, prompts, watch, seconds, every, name)
    if "generate" in parts:
        measure_generate(wrapped, prompts, watch, new, "generate, HuggingFace's prompts")
        wrapped = compiled_llm.wrap(compiled_llm.unwrap(wrapped), images_in_steps=True, **options)
        wrapped.compiled.warmup(1)
        measure_generate(wrapped, prompts, watch, new, "generate")
    print({name: round(nbytes / 2**20) for name, nbytes in wrapped.compiled.stats().memory.items()}, "MiB")
    if json is not None:
        json.write_text(jsons.dumps({"model": model, "length": prompts.length, "results": watch.found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
