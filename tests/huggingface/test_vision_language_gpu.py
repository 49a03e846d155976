"""Images on a GPU, in bfloat16: answers after HuggingFace's prefill have logits as exact as HuggingFace's own."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import pad

import compiled_llm
from compiled_llm.engine.images.encoder.encoder_graphs import EncoderGraphs
from support.execution.twins import OPTIONS, on_device, rms, twins_of
from support.gpu import needs_cuda
from support.huggingface.vision import FAMILIES as KNOWN, IMAGE, with_images
from support.huggingface.vision_gpu import in_dtype, judged, of_an_answer, of_family
from support.parity import assert_account_is_empty, greedy

pytestmark = [pytest.mark.gpu, needs_cuda]

FAMILIES = ["Gemma3", "Qwen3VL", "Llava"]
IN_STEPS = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"]
CAPTURED = [*FAMILIES, "Qwen3_5", "Lfm2Vl"]
OTHERS = [family for family in KNOWN if family not in FAMILIES]
NEW = 40
ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


@pytest.mark.parametrize(
    ("family", "mode", "in_steps"),
    [
        *product(CAPTURED, ["cuda-graphs"], [False]),
        *product(FAMILIES + OTHERS, ["eager"], [False]),
        *(pytest.param(family, "cuda-graphs", True, marks=pytest.mark.unchecked_pages) for family in IN_STEPS),
    ],
)
def test_answers_to_images_have_logits_as_exact_as_huggingfaces(
    family: str, mode: str, in_steps: bool, seed: int
) -> None:
    """Prompts with one image, none and two, at once and again; in steps with an encoder that is captured."""
    twins = twins_of(of_family(family, seed).to("cuda", torch.bfloat16), mode=mode, images_in_steps=in_steps)
    if in_steps:
        twins.wrapped.compiled.warmup(3)
    for given in (with_images(family, seed), with_images(family, seed + 1), with_images(family, seed)):
        given = in_dtype(on_device(given), torch.bfloat16)
        out = greedy(twins.wrapped, given, NEW, suppress_tokens=list(range(IMAGE, 128)), **ASKED)
        exact, plain = (of_an_answer(model, given, out.sequences) for model in (twins.exact, twins.plain))
        ours, theirs = (judged(family, rms(logits - exact)) for logits in (torch.stack(out.logits).float(), plain))
        assert ours <= 1.1 * theirs, f"RMS error {ours:.3e}, HuggingFace's {theirs:.3e}"
        assert exact.std() > 10 * theirs
    del out  # its cache holds pages
    stats = twins.wrapped.compiled.stats()
    assert stats.generate_calls == {"fast loop": 3}
    # Before 5.20, outputs have what ``generate`` notes of positions: steps that were compiled before it are once more.
    most = 2 if in_steps and Version(transformers.__version__) < Version("5.20") else 0
    counts = twins.wrapped.compiled.model_runner().graph_manager.programs.graph_counts()
    assert stats.recompiles <= most, f"graphs by program: {counts}"
    assert stats.graph_breaks == 0
    if in_steps:
        assert stats.slow_paths == {}
        assert EncoderGraphs.of(twins.wrapped.compiled.model_runner()).replays
    assert_account_is_empty(twins.wrapped)
    compiled_llm.unwrap(twins.wrapped)
    gc.collect()


@pytest.mark.parametrize(
    ("family", "in_steps"),
    [*product([*FAMILIES, "Qwen3VLMoe", "Qwen3_5Moe"], [False]), *product(IN_STEPS, [True])],
)
def test_a_image_in_a_second_turn(family: str, in_steps: bool, seed: int) -> None:
    """Over the cache of a first turn that had images, in float32, where no expert is a near tie: the same tokens."""
    plain, wrapped = (of_family(family, seed).to("cuda") for _ in range(2))
    wrapped = compiled_llm.wrap(
        wrapped, **{**OPTIONS, "backend": "triton", "progress": False, "images_in_steps": in_steps}
    )
    given, answers = on_device(with_images(family, seed)), []
    for model in (plain, wrapped):
        first = greedy(model, given, 9, return_dict_in_generate=True)
        text = pad(first.sequences, (0, 3), value=7)
        mask = pad(given["attention_mask"], (0, 12), value=1)
        answers.append(
            greedy(model, {"input_ids": text, "attention_mask": mask}, 9, past_key_values=first.past_key_values)
        )
    torch.testing.assert_close(*answers)
    compiled_llm.unwrap(wrapped)
