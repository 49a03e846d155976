"""The worked examples of CONTRIBUTING do what it says, from the code as it stands there."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import compiled_llm
from compiled_llm.kinds.registry import CODECS
from compiled_llm.requests import sampling_params
from compiled_llm.requests.sampling_params import SamplingNumbers, number_fields
from compiled_llm_ops import backends
from compiled_llm_ops.contracts import SCALED_DTYPES
from compiled_llm_ops.reference.backend import Reference
from support.docs.pages import CHECKOUT
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "400 tokens", "progress": False}
SECTION = (CHECKOUT / "CONTRIBUTING.md").read_text().partition("## Worked examples\n")[2].partition("\n## ")[0]
CODE = re.findall(r"```python\n(.+?)```", SECTION, re.DOTALL)


def example(word: str) -> str:
    """The block of code that has a word."""
    (code,) = (code for code in CODE if word in code)
    return str(code)


def module_of(code: str) -> Any:
    module = ModuleType("worked_example")
    exec(code, vars(module))
    return module


def test_pages_of_int8(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    codec = module_of(example("int8")).CODEC
    monkeypatch.setitem(SCALED_DTYPES, codec.dtype, codec.largest)
    monkeypatch.setattr(Reference, "kv_dtypes", frozenset(SCALED_DTYPES))
    monkeypatch.setitem(CODECS, "int8", codec)
    monkeypatch.setattr(compiled_llm.config, "KVDtype", Literal["fp8_e4m3", "int8"])
    plain, prompt = tiny_qwen3(eos_token_id=None), torch.randint(3, 30, (1, 9))
    scales = compiled_llm.kv_scales(plain, prompt.tolist())
    expected = plain(prompt).logits.detach()
    model: Any = compiled_llm.wrap(plain, kv_dtype="int8", kv_scales=scales, **OPTIONS)
    cache = model.compiled.new_cache()
    logits = torch.cat([model(token, past_key_values=cache).logits for token in prompt.split(1, dim=1)], dim=1)
    assert model.compiled.model_runner().state.pages[0].dtype == torch.int8
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.1 * float(expected.abs().max()))


def test_a_sampling_parameter() -> None:
    body = "".join(f"    {line}\n" for line in example("top_a").splitlines())
    found: dict[str, Any] = {**vars(sampling_params), "__name__": sampling_params.__name__}
    exec(f"class More(SamplingNumbers):\n{body}", found)
    field = number_fields(dataclass(frozen=True, eq=False, kw_only=True)(found["More"]))["top_a"]
    assert field.number.draws
    assert [field.fits(value) for value in (0.0, 0.5, 1, 1.5, -1, None)] == [True, True, True, False, False, False]
    assert "top_a" not in number_fields(SamplingNumbers)


def test_a_tap_that_records_entropy() -> None:
    tap = module_of(example("Entropy")).Entropy()
    model: Any = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **OPTIONS)
    loop = model.compiled.generate_loop()
    loop.admit([5, 9, 3], 4)
    with loop.watched([tap]):
        for _ in range(4):
            loop.step()
    loop.close()
    assert [tuple(own.shape) for own in tap.found] == [(1,)] * 4


def test_a_backend_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "windowless", module_of(example("Windowless")))
    monkeypatch.setitem(backends.BACKENDS, "windowless", "windowless")
    plain, prompt = tiny_qwen3(eos_token_id=None), torch.tensor([[5, 9, 3]])
    expected = plain.generate(prompt, max_new_tokens=5, do_sample=False)
    model: Any = compiled_llm.wrap(plain, backend="windowless", **OPTIONS)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="it has no kernels for windows"):
        compiled_llm.wrap(MistralForCausalLM(config), backend="windowless", **OPTIONS)
