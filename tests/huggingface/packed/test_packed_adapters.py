"""Adapters of PEFT's on packed layers: ours below those that call their base alone, the library's below all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from peft.tuners import ia3, lora, randlora
from peft.tuners.lora import dora
from torch import Tensor, nn

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.huggingface.pairs import OPTIONS
from support.packed_layers import ao_int8, bnb_nf4, packed_model, values_of
from support.parity import mixed_prompts
from support.tiny_models import tiny_llama

PROMPTS = mixed_prompts([7, 4, 7], 128, seed=0)
LAYERS = ["q_proj", "up_proj"]
ADAPTED = 4
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: _lora(),
    "rsLoRA": lambda: _lora(use_rslora=True),
    "DoRA": lambda: _lora(use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=[], init_ia3_weights=False),
    "IA3 on inputs": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=LAYERS, init_ia3_weights=False),
    "RandLora": lambda: peft.RandLoraConfig(r=4, randlora_alpha=64, init_weights=False, target_modules=LAYERS),
}
READ_THEIR_BASE = {"DoRA", "IA3 on inputs"}
PACKS = {"NF4": ("nf4-g64", bnb_nf4), "torchao's int8": ("int8-row", ao_int8)}


def _lora(**options: Any) -> peft.PeftConfig:
    return peft.LoraConfig(r=4, lora_alpha=32, init_lora_weights=False, target_modules=LAYERS, **options)


@pytest.fixture(autouse=True)
def named_as_bitsandbytes_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PEFT's classes for its layers have the same name; those for all layers, which run here, have it for the test."""
    for kind in (lora.Linear, ia3.Linear, randlora.Linear):
        kind.__name__ = "Linear4bit"
    for module in (dora, lora.variants):  # of layers that are made by hand
        monkeypatch.setattr(module, "dequantize_module_weight", values_of)
    yield
    for kind in (lora.Linear, ia3.Linear, randlora.Linear):
        kind.__name__ = "Linear"


def adapted(pack: Callable[[nn.Linear], nn.Module], kind: str, *names: str) -> tuple[Any, Any]:
    """A packed model, and PEFT's around it with random adapters."""
    own = packed_model(tiny_llama(eos_token_id=None, initializer_range=0.1), pack)
    for number, name in enumerate(names):
        torch.manual_seed(number)
        if number == 0:
            tuned: Any = peft.get_peft_model(own, KINDS[kind](), adapter_name=name)
        else:
            tuned.add_adapter(name, KINDS[kind]())
    return own, tuned.eval()


@torch.no_grad()
def logits(own: Any) -> tuple[Tensor, Tensor]:
    """Of four steps, and of a forward."""
    asked = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(own.generate(**PROMPTS, **asked).logits), own(**PROMPTS).logits[:, -1]


def assert_as(own: Any, expected: tuple[Tensor, Tensor]) -> None:
    for found, right in zip(logits(own), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@contextmanager
def changed(tuned: Any, change: str) -> Iterator[None]:
    """Some state of an adapter, for the block."""
    with tuned.disable_adapter() if change == "disabled" else torch.no_grad():
        if change == "second":
            tuned.set_adapter("second")
        yield
        tuned.set_adapter("first")


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_acts_on_packed_layers(kind: str, pack: str) -> None:
    own, tuned = adapted(PACKS[pack][1], kind, "first", "second")
    expected = {}
    for change in ("first", "disabled", "second"):
        with changed(tuned, change):
            expected[change] = logits(own)
    modules, parameters = dict(own.named_modules()), dict(own.named_parameters())
    compiled_llm.wrap(own, **OPTIONS)
    for change in (*expected, "first"):
        with changed(tuned, change):
            assert_as(own, expected[change])
    assert not torch.allclose(expected["first"][1], expected["disabled"][1], atol=0.1)
    assert not torch.allclose(expected["first"][1], expected["second"][1], atol=0.1)
    assert own.compiled.stats().generate_calls == {"fast loop": 4}
    assert whose(own) == (14 - ADAPTED * (kind in READ_THEIR_BASE), ADAPTED * (kind in READ_THEIR_BASE))
    with Engine(own, tokenizer=None) as engine:
        ids = PROMPTS["input_ids"][0].tolist()
        found = engine.submit(ids, SamplingParams(temperature=0, max_tokens=4)).result().token_ids
    assert found == expected["first"][0][:, 0].argmax(-1).tolist()
    compiled_llm.unwrap(own)
    assert dict(own.named_modules()) == modules
    assert all(tensor is parameters[name] for name, tensor in own.named_parameters())
    for found, right in zip(logits(own), expected["first"], strict=True):
        assert torch.equal(found, right)


def whose(own: Any) -> tuple[int, int]:
    """How many packed layers are ours, and the library's."""
    counted = own.compiled.stats().weights.items()
    return tuple(sum(count for words, count in counted if end in words) for end in (": compiled_llm", ": its library"))  # type: ignore[return-value]


def test_an_adapter_that_reads_its_base_may_come_after_wrap() -> None:
    own, tuned = adapted(ao_int8, "LoRA", "first")
    other, around = adapted(ao_int8, "LoRA", "first")
    compiled_llm.wrap(own, **OPTIONS)
    assert_as(own, logits(other))
    assert whose(own) == (14, 0)
    for model in (tuned, around):
        torch.manual_seed(1)
        model.add_adapter("second", KINDS["DoRA"]())
        model.eval()
        model.set_adapter("second")
    assert_as(own, logits(other))
    assert whose(own) == (14 - ADAPTED, ADAPTED)
    for model in (tuned, around):
        model.delete_adapter("second")
        model.set_adapter("first")
    assert_as(own, logits(other))
    assert whose(own) == (14, 0)


def test_an_adapter_with_another_forward_may_do_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a trainer has put its own into PEFT's class."""
    own, _ = adapted(ao_int8, "LoRA", "first")
    original = lora.Linear.forward

    def doubled(self: Any, input: Tensor) -> Tensor:
        twice: Tensor = original(self, input) + nn.functional.linear(input, values_of(self.base_layer))
        return twice

    monkeypatch.setattr(lora.Linear, "forward", doubled)
    expected = logits(own)
    compiled_llm.wrap(own, **OPTIONS)
    assert_as(own, expected)
    assert whose(own) == (14 - ADAPTED, ADAPTED)
