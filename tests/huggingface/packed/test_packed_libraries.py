"""Layers that bitsandbytes, torchao and compressed-tensors have packed: under adapters, in heads, of other classes."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.huggingface.families import EXPERTS, make
from support.huggingface.pairs import OPTIONS
from support.parity import mixed_prompts
from support.tiny_models import tiny_llama

PROMPTS = mixed_prompts([7, 4, 7], 128, seed=0)
LAYERS = {"target_modules": ["q_proj", "up_proj"]}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 32, "init_lora_weights": False, **LAYERS}
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "rsLoRA": lambda: peft.LoraConfig(**LORA, use_rslora=True),
    "DoRA": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "IA3": lambda: peft.IA3Config(**LAYERS, feedforward_modules=["up_proj"], init_ia3_weights=False),
    "RandLora": lambda: peft.RandLoraConfig(r=4, randlora_alpha=64, init_weights=False, **LAYERS),
}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package}")


@cache
def folder() -> str:
    path = tempfile.mkdtemp()
    tiny_llama(eos_token_id=None, num_hidden_layers=2, initializer_range=0.1).save_pretrained(path)
    return path


def of_four_bits(**options: Any) -> Any:
    """Without the kernel of some processors, which rounds to 16 bits, and packs weights anew in the first call."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    own = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32, quantization_config=config).eval()
    for module in own.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return own


def of_eight_bits(family: str = "", **options: Any) -> Any:
    """By torchao, every linear layer."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    own = make(family, options, 0) if family else tiny_llama(num_hidden_layers=2, **options)
    quantize_(own, Int8WeightOnlyConfig(set_inductor_config=False))
    return own


@torch.no_grad()
def logits(own: Any) -> tuple[Tensor, Tensor]:
    """Of four steps, and of a forward."""
    asked = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(own.generate(**PROMPTS, **asked).logits), own(**PROMPTS).logits[:, -1]


def assert_near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)


@needs("bitsandbytes")
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("kind", "mode"), [*((kind, "eager") for kind in KINDS), ("LoRA", "compile")])
def test_adapters_on_four_bits_act_as_without_us(kind: str, mode: str) -> None:
    own = of_four_bits()
    torch.manual_seed(0)
    tuned: Any = peft.get_peft_model(own, KINDS[kind](), adapter_name="first")
    tuned.add_adapter("second", KINDS[kind]())
    around = copy.deepcopy(tuned.eval())
    compiled_llm.wrap(own, **{**OPTIONS, "mode": mode})
    seen = []
    for change in ("first", "second", "disabled", "first"):
        for each in (tuned, around):
            each.base_model.enable_adapter_layers()
            if change == "disabled":
                each.base_model.disable_adapter_layers()
            else:
                each.set_adapter(change)
        seen.append(logits(around.get_base_model()))
        assert_near(logits(own), seen[-1])
    first, second, disabled, _ = (of_forward for _, of_forward in seen)
    assert not any(torch.allclose(*both, atol=0.1) for both in ((first, second), (first, disabled), (second, disabled)))
    counted = own.compiled.stats().weights
    left = 4 if kind == "DoRA" else 0
    assert counted["nf4-g64: compiled_llm"] == 14 - left
    assert sum(counted.values()) == 14
    with Engine(own, tokenizer=None) as engine:
        ids = PROMPTS["input_ids"][0].tolist()
        tokens = engine.submit(ids, SamplingParams(temperature=0, max_tokens=4)).result().token_ids
    assert tokens == seen[-1][0][:, 0].argmax(-1).tolist()
    if kind not in ("IA3", "RandLora"):  # PEFT cannot merge these into four bits
        for change in ("merge_adapter", "unmerge_adapter"):
            for each in (tuned, around):
                getattr(each, change)()
            assert_near(logits(own), logits(around.get_base_model()))
    compiled_llm.unwrap(own)
    for found, right in zip(logits(own), logits(around.get_base_model()), strict=True):
        assert torch.equal(found, right)


@needs("bitsandbytes")
def test_a_merged_adapter_that_is_disabled_is_taken_out_as_without_us() -> None:
    own = of_four_bits()
    tuned: Any = peft.get_peft_model(own, KINDS["LoRA"]()).eval()
    around = copy.deepcopy(tuned)
    compiled_llm.wrap(own, **OPTIONS)
    for each in (tuned, around):
        each.merge_adapter()
    with tuned.disable_adapter(), around.disable_adapter():
        assert_near(logits(own), logits(around.get_base_model()))
    assert_near(logits(own), logits(around.get_base_model()))


@needs("bitsandbytes")
def test_a_class_of_its_own_over_four_bits_runs_its_forward() -> None:
    from bitsandbytes.nn import Linear4bit

    class Twice(Linear4bit):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:
            twice: Tensor = 2 * super().forward(input)
            return twice

    own = of_four_bits()
    own.model.layers[0].mlp.down_proj.__class__ = Twice
    expected = logits(own)
    assert_near(logits(compiled_llm.wrap(own, **OPTIONS)), expected)
    assert sorted(own.compiled.stats().weights.values()) == [1, 13]


class TwiceLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@needs("torchao")
def test_a_class_of_its_own_over_weights_of_torchao_runs_its_forward() -> None:
    own = of_eight_bits()
    own.model.layers[0].mlp.down_proj.__class__ = TwiceLinear
    expected = logits(own)
    assert_near(logits(compiled_llm.wrap(own, **OPTIONS)), expected)
    own.model.layers[1].mlp.down_proj.__class__ = TwiceLinear
    seen = logits(own)
    assert sorted(own.compiled.stats().weights.values()) == [2, 13]
    assert_near(seen, logits(compiled_llm.unwrap(own)))


CHUNKS = {"head_dim": 16, "attention_chunk_size": 8192, "intermediate_size_mlp": 96, "max_position_embeddings": 512}


@needs("torchao")
@pytest.mark.parametrize(("family", "options"), [("Phimoe", {"sliding_window": 8}), ("Llama4", CHUNKS)])
def test_routers_of_a_class_of_their_own_are_torchao_s(family: str, options: dict[str, Any]) -> None:
    own = of_eight_bits(family, **options, **EXPERTS)
    expected = logits(own)
    assert_near(logits(compiled_llm.wrap(own, **OPTIONS)), expected)
    assert any("Router is a class of its own" in words for words in own.compiled.stats().weights)


def _compressed_head() -> Any:
    """Four bits a weight, the head's too."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    own: Any = tiny_llama(eos_token_id=None, num_hidden_layers=1)
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    apply_quantization_config(own, QuantizationConfig(config_groups=groups))
    for module in own.modules():
        if isinstance(module, nn.Linear):
            scale: Any = module.weight_scale
            scale.data.copy_(module.weight.detach().unflatten(1, (-1, 32)).abs().amax(-1) / 7)
    ModelCompressor.from_pretrained_model(own, "pack-quantized").compress_model(own)
    return own


HEADS = [
    pytest.param(lambda: of_four_bits(llm_int8_skip_modules=["embed_tokens"]), marks=needs("bitsandbytes"), id="NF4"),
    pytest.param(_compressed_head, marks=needs("compressed_tensors"), id="compressed-tensors"),
]


@pytest.mark.parametrize("load", HEADS)
def test_a_packed_head_gives_the_library_s_logits_and_keeps_its_weights(load: Callable[[], Any]) -> None:
    own = load()
    expected, before = logits(copy.deepcopy(own)), {name: tensor.clone() for name, tensor in own.named_parameters()}
    if hooked := hasattr(own, "ct_decompress_hook"):  # it cannot run unwrapped without
        own.ct_decompress_hook.remove()
        del own.ct_decompress_hook
    compiled_llm.wrap(own, **OPTIONS, packed=True)
    assert_near(logits(own), expected)
    compiled_llm.unwrap(own)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.named_parameters())
    if not hooked:
        assert_near(logits(own), expected)
