"""A process that takes kept programs says what one says that traces them, bit for bit, and enters Dynamo nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_llm.compat.torch.inductor import inductor_cache
from support.compilation.kept_programs import result_of
from support.huggingface.families import FAMILIES

pytestmark = pytest.mark.slow

ALWAYS = ("Gemma3",)  # and Llama, of the cache
OTHERS = (
    *("Llama", "Qwen3", "Qwen2", "Mistral", "Mixtral", "Phi3", "Gemma2", "GPT2LMHead", "Cohere", "Olmoe", "Olmo2"),
    *("Granite", "Starcoder2", "StableLm", "Qwen3Moe", "GPTNeoX", "Falcon", "OPT", "Glm4", "SmolLM3", "GptOss"),
    "DeepseekV3",
)


def each_family() -> pytest.MarkDecorator:
    known = [name for name in OTHERS if name in FAMILIES or name in ("Llama", "Qwen3")]
    cases = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.whole) for name in known)]
    return pytest.mark.parametrize("family", cases)


@each_family()
def test_tokens_and_logits_are_those_of_a_process_that_traces(family: str, tmp_path: Path) -> None:
    (tmp_path / "inductor").symlink_to(inductor_cache())
    traced = result_of("keep", family, tmp_path)
    assert traced["not kept"] == {}
    taken = result_of("take", family, tmp_path)
    assert taken["programs"] == dict.fromkeys(traced["programs"], "kept")
    assert (taken["answers"], taken["bits"]) == (traced["answers"], traced["bits"])
    assert taken["traces"] == 0
    assert taken["imported"] == []
