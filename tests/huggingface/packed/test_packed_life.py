"""The life of a model with packed weights: adapters, engines, sleep, artifacts, new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.compilation.artifacts.made_for import made_for
from compiled_llm.config import WrapConfig
from compiled_llm.execution.lifecycle import runner_lifecycle
from compiled_llm.model.packed import part
from compiled_llm.model.version.tensors import tensors_of
from support.huggingface.pairs import OPTIONS
from support.packed_layers import (
    PACK,
    ao_int8,
    bnb_int8,
    bnb_nf4,
    ct_typed,
    fp8_blocks,
    gptq,
    packed_model,
    unpacked_model,
)
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_llama

PROMPTS = mixed_prompts([5, 3], 128, seed=0)


def packed(pack: Any = fp8_blocks) -> Any:
    return packed_model(tiny_llama(eos_token_id=None), pack)


def answer(own: Any) -> Any:
    return greedy(own, PROMPTS, 8)


def adapted(own: Any, *names: str) -> Any:
    """A model with LoRA on layers that are packed, of a class that PEFT knows, and random adapters."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    made = peft.get_peft_model(own, config, adapter_name=names[0])
    for name in names[1:]:
        made.add_adapter(name, config)
    return made.eval()


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_adapters_of_peft_act_on_top(mode: str) -> None:
    own = packed()
    model = adapted(own, "one", "two")
    plain = adapted(unpacked_model(packed()), "one", "two")
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # PEFT has rounded them to the type of the weight
            plain.get_parameter(name).data = parameter.detach().clone()
    compiled_llm.wrap(own, **{**OPTIONS, "mode": mode}, packed=True)
    tokens = []
    for name in ("one", "two", "one"):
        for each in (model, plain):
            each.set_adapter(name)
        tokens.append(answer(model))
        assert torch.equal(tokens[-1], answer(plain)), name
    assert not torch.equal(tokens[0], tokens[1])
    assert own.compiled.stats().weights == {"fp8-block32: compiled_llm": 14}


def test_an_engine_serves_packed_weights_and_sleeps() -> None:
    own = packed(gptq)
    ids = [5, 17, 40, 8]
    expected = unpacked_model(own).generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    compiled_llm.wrap(own, **OPTIONS)
    with Engine(own, tokenizer=None) as engine, Engine(own, tokenizer=None) as second:
        for _ in range(2):
            for one in (engine, second):
                assert (
                    one.submit(ids, SamplingParams(temperature=0, max_tokens=6)).result().token_ids
                    == expected[0, 4:].tolist()
                )
            engine.sleep(weights=True)
            engine.wake()
    assert own.compiled.stats().weights == {"int4-g32: compiled_llm": 14}


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("pack", [gptq, ao_int8, bnb_int8, bnb_nf4, ct_typed, fp8_blocks])
def test_packed_weights_move_to_host_memory_and_back(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, to other memory; what still held the old one would keep it on the device."""
    monkeypatch.setattr(runner_lifecycle, "is_host", lambda device: False)
    own = compiled_llm.wrap(packed(pack), **OPTIONS)
    tokens, before = answer(own), addresses(own)
    stand_ins: Any = own.compiled.facts.stand_ins
    with Engine(own, tokenizer=None) as engine:
        engine.sleep(weights=True)
        assert all(tensor is None for module in stand_ins._modules.values() for tensor in module._parameters.values())
        assert not before & addresses(own)
        engine.wake()
    assert torch.equal(answer(own), tokens)


def addresses(own: Any) -> set[int]:
    """Where the tensors of packed layers are."""
    layers = [module for module in own.modules() if hasattr(module, "stands_for") or isinstance(module, nn.Linear)]
    held = [tensor for layer in layers for tensor in tensors_of(layer) if not is_wrapper(tensor)]
    return {tensor.data_ptr() for tensor in held}


def test_too_little_memory_to_unpack_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 4 * 64 * 128
    own = packed(gptq)
    monkeypatch.setattr(part, "free_bytes", lambda device: largest - 1)
    with pytest.raises(compiled_llm.UnsupportedModelError, match=f"{largest} bytes.* and {largest - 1} are free"):
        compiled_llm.wrap(own, **OPTIONS)
    monkeypatch.setattr(part, "free_bytes", lambda device: largest)
    answer(compiled_llm.wrap(own, **OPTIONS))


def test_layers_that_cannot_be_unpacked_together_are_no_one_product(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    largest = 4 * 64 * 128
    monkeypatch.setattr(part, "free_bytes", lambda device: 2 * largest - 1)
    own = compiled_llm.wrap(packed(gptq), **OPTIONS)
    assert not own.compiled.facts.groups_of_stand_ins
    assert "2 groups of packed layers, model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj among" in caplog.text
    expected = answer(own)
    monkeypatch.setattr(part, "free_bytes", lambda device: 2 * largest)
    again = compiled_llm.wrap(packed(gptq), **OPTIONS)
    assert len(again.compiled.facts.groups_of_stand_ins) == 2
    assert torch.equal(answer(again), expected)


def test_tables_that_are_made_of_zeros_are_counted() -> None:
    own = compiled_llm.wrap(packed(gptq), **OPTIONS)
    answer(own)
    zeros = sum(8 * layer.qzeros.numel() for layer in own.modules() if hasattr(layer, "qzeros"))
    assert own.compiled.stats().memory["tables"] == zeros


def test_artifacts_are_made_for_a_format() -> None:
    def needs(model: Any, **options: Any) -> Any:
        return made_for(model, type(model), WrapConfig(**options))

    own = packed()
    assert needs(own)["packed weights"] == {"fp8-block32": 14}
    assert needs(own, packed=False)["packed weights"] == {}
    assert needs(own, packed=False)["option packed"] is False
    assert needs(packed(gptq))["packed weights"] == {"int4-g32": 14}
    json.dumps(needs(own))


AS_IN_FILES = [name for name in PACK if name.startswith(("transformers", "compressed-tensors"))]
"""Those whose modules hold what their files do."""


def with_config(name: str, own: Any, **more: Any) -> Any:
    """A model that says what it was quantised by, as one that its library has loaded."""
    method = {"transformers": "fp8", "NF4": "bitsandbytes", "GPTQ": "gptq", "AWQ": "awq"}
    found = next((method[key] for key in method if key in name), name.partition(",")[0])
    own.config.quantization_config = {"quant_method": found, "weight_block_size": [32, 32], **more}
    return own


def of_seed(name: str, seed: int, **more: Any) -> Any:
    return with_config(
        name, packed_model(tiny_llama(seed, eos_token_id=None, num_hidden_layers=1), PACK[name][1]), **more
    )


@pytest.mark.parametrize("name", AS_IN_FILES)
def test_new_weights_of_the_same_quantisation_are_written_in_their_place(name: str, tmp_path: Path) -> None:
    own, other = of_seed(name, 0), of_seed(name, 1)
    before, expected = answer(unpacked_model(own)), answer(unpacked_model(other))
    other.save_pretrained(tmp_path)
    compiled_llm.wrap(own, **OPTIONS, packed=True)
    assert torch.equal(answer(own), before)
    state = own.state_dict(keep_vars=True)
    addresses = [tensor.data_ptr() for tensor in state.values()]
    with Engine(own, tokenizer=None) as engine:
        engine.update_weights(tmp_path)
    assert torch.equal(answer(own), expected)
    assert not torch.equal(before, expected)
    assert all(own.state_dict(keep_vars=True)[name] is tensor for name, tensor in state.items())
    assert [tensor.data_ptr() for tensor in state.values()] == addresses


@pytest.mark.parametrize("name", [name for name in PACK if name not in AS_IN_FILES])
def test_new_weights_for_modules_that_hold_others_than_files_do_are_refused(name: str, tmp_path: Path) -> None:
    own = of_seed(name, 0)
    tiny_llama(1, num_hidden_layers=1).save_pretrained(tmp_path)
    compiled_llm.wrap(own, **OPTIONS)
    tokens = answer(own)
    with Engine(own, tokenizer=None) as engine, pytest.raises(ValueError, match=r"quantised.*; load it again"):
        engine.update_weights(tmp_path)
    assert torch.equal(answer(own), tokens)


def test_new_weights_of_another_quantisation_are_refused(tmp_path: Path) -> None:
    fp8, words = "transformers, blocks", "compressed-tensors, 4 bits"
    plain = tiny_llama(1, num_hidden_layers=1)
    folders: dict[str, tuple[str, Any]] = {
        "not quantised, and those of the model are": (fp8, plain),
        r"in another way \(weight_block_size\)": (fp8, of_seed(fp8, 0, weight_block_size=[64, 32])),
        "proj.weight has the dtype F32 in the folder, and torch.float8_e4m3fn": (
            fp8,
            with_config(fp8, tiny_llama(1, num_hidden_layers=1)),
        ),
        r"in another way \(quant_method\)": (words, of_seed(fp8, 0)),
        r"weight_packed has the shape .*, and .* in the model": (
            words,
            with_config(words, of_seed("compressed-tensors, 8 bits", 0)),
        ),
    }
    for number, (message, (name, other)) in enumerate(folders.items()):
        own = compiled_llm.wrap(of_seed(name, 0), **OPTIONS)
        tokens = answer(own)
        other.save_pretrained(tmp_path / str(number))
        with Engine(own, tokenizer=None) as engine, pytest.raises(ValueError, match=message):
            engine.update_weights(tmp_path / str(number))
        assert torch.equal(answer(own), tokens)


class NewMemory(TorchDispatchMode):
    """Notes results that share no memory with their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in held_in((args, kwargs))}
        new = [tensor for tensor in held_in(made) if tensor.untyped_storage().data_ptr() not in known]
        self.made += [(tensor.dtype, tensor.nbytes) for tensor in new]
        return made


def held_in(values: Any) -> list[Any]:
    return [value for value in tree_leaves(values) if type(value) in (torch.Tensor, nn.Parameter)]


@pytest.mark.parametrize("pack", [ct_typed, fp8_blocks])
def test_wrap_copies_no_codes_and_unpacks_one_layer_at_a_time(pack: Any) -> None:
    own = packed(pack)
    with NewMemory() as new:
        compiled_llm.wrap(own, **OPTIONS)
    assert not sum(nbytes for dtype, nbytes in new.made if dtype in (torch.int8, torch.float8_e4m3fn))
    assert max(nbytes for _, nbytes in new.made) <= 4 * 64 * 128
