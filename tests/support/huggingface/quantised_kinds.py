"""Ways to quantise a tiny Llama, and what `wrap` makes of each: the rows of docs/reference/compatibility.md."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

from support.tiny_gguf import write_gguf
from support.tiny_models import tiny_llama

GROUP = 32
MODES = ("eager", "compile")


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    name: str  # as the row says it
    load: Callable[[], PreTrainedModel]  # makes the model
    needs: str = ""  # the package that it takes, besides those of all tests
    refused: str = ""  # by which message, in the modes that refuse
    modes: frozenset[str] = frozenset(MODES)  # those that refuse
    plain: bool = False  # whether it leaves plain weights
    # whether activations are rounded by the largest of all tokens of a call, so that rows change each other
    by_call: bool = False

    def __str__(self) -> str:
        return self.name

    def refuses(self, mode: str) -> bool:
        return bool(self.refused) and mode in self.modes

    @property
    def row(self) -> str:
        served = "✓ by the call" if self.by_call else "✓"
        return f"| {self.name} | {' | '.join('refused' if self.refuses(m) else served for m in MODES)} |"


def model() -> PreTrainedModel:
    return tiny_llama(eos_token_id=None, num_hidden_layers=2)


@cache
def folder() -> str:
    """The model as a folder."""
    path = tempfile.mkdtemp()
    model().save_pretrained(path)
    return path


def loaded(path: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


# ---- torch's own


def _dynamic(chosen: Any) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated in favour of torchao
        return torch.ao.quantization.quantize_dynamic(model(), chosen)


# ---- what transformers quantises while it loads


def _torchao(name: str, **options: Any) -> PreTrainedModel:
    import torchao.quantization

    return loaded(folder(), quantization_config=TorchAoConfig(getattr(torchao.quantization, name)(), **options))


def _bitsandbytes(**options: Any) -> PreTrainedModel:
    return loaded(folder(), quantization_config=BitsAndBytesConfig(**options))


def _quanto(weights: str) -> PreTrainedModel:
    return loaded(folder(), quantization_config=QuantoConfig(weights=weights))


# ---- what is in the files


@cache
def _gguf() -> Path:
    path = Path(tempfile.mkdtemp()) / "tiny.gguf"
    write_gguf(path, model())
    return path


def _from_gguf() -> PreTrainedModel:
    return loaded(str(_gguf().parent), gguf_file=_gguf().name)


@cache
def _compressed() -> str:
    """Four bits a weight, by compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    path, compressed = tempfile.mkdtemp(), model()
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    apply_quantization_config(compressed, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in compressed.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
            scale: Any = module.weight_scale
            largest = module.weight.detach().unflatten(1, (-1, GROUP)).abs().amax(-1)
            scale.data.copy_(largest / 7)
    compressor = ModelCompressor.from_pretrained_model(compressed, "pack-quantized")
    compressor.compress_model(compressed)
    compressed.save_pretrained(path)
    compressor.update_config(path)
    return path


@cache
def _packed(method: str) -> str:
    """Four bits a weight, as GPTQ and AWQ store them."""
    path, plain, stored = tempfile.mkdtemp(), model(), dict[str, Tensor]()
    for name, weight in plain.state_dict().items():
        if "_proj" in name:
            packed = _gptq(weight) if method == "gptq" else _awq(weight)
            stored |= {name.replace("weight", part): tensor.contiguous() for part, tensor in packed.items()}
        else:
            stored[name] = weight
    save_file(stored, Path(path) / "model.safetensors", metadata={"format": "pt"})
    plain.generation_config.save_pretrained(path)
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP}
    gptq: dict[str, Any] = {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    awq: dict[str, Any] = {"zero_point": True, "version": "gemm"}
    settings = plain.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization | (gptq if method == "gptq" else awq),
    }
    (Path(path) / "config.json").write_text(json.dumps(settings))
    return path


def _levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers 0 to 15 of a transposed weight, ``[I, O]``, and the step of each group."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    steps = groups.abs().amax(1) / 7
    return (groups / steps[:, None]).round().clamp(-8, 7).flatten(0, 1).long() + 8, steps


def _in_words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight columns into one of 32 bits."""
    words = sum(numbers[:, column::8] << (4 * place) for place, column in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    numbers, steps = _levels(weight)
    return {
        "qweight": _in_words(numbers.T).T,
        "qzeros": _in_words(torch.full(steps.shape, 7)),  # one less than the zero
        "scales": steps.half(),
        "g_idx": torch.arange(len(numbers), dtype=torch.int32) // GROUP,
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    numbers, steps = _levels(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _in_words(numbers, order),
        "qzeros": _in_words(torch.full(steps.shape, 8), order),
        "scales": steps.half(),
    }


PACKED = r"lm_head|model\.\S+ is a torch.ao.nn\S+, whose packed weight torch cannot compile.*mode='eager'"
UNPACKED_LATE = r"q_proj is a \S+Linear, whose weight compressed-tensors .*CompressedTensorsConfig\(dequantize=True\)"
OUTLIERS = r"q_proj is a bitsandbytes\S+, which looks for outliers .*llm_int8_threshold=0.0"
COMPILED = frozenset({"compile"})

WAYS = [
    Way("`torch.ao.quantization.quantize_dynamic`", lambda: _dynamic({nn.Linear}), "", PACKED, COMPILED, by_call=True),
    Way("the same, `lm_head` alone", lambda: _dynamic({"lm_head"}), "", PACKED, COMPILED, by_call=True),
    Way("a GGUF file, unpacked by transformers", _from_gguf, plain=True),
    Way("torchao, `Int8WeightOnlyConfig`", lambda: _torchao("Int8WeightOnlyConfig"), "torchao"),
    Way(
        "the same with `include_input_output_embeddings`",
        lambda: _torchao("Int8WeightOnlyConfig", include_input_output_embeddings=True),
        "torchao",
    ),
    Way(
        "torchao, `Int8DynamicActivationInt8WeightConfig`",
        lambda: _torchao("Int8DynamicActivationInt8WeightConfig"),
        "torchao",
    ),
    Way("torchao, `Float8WeightOnlyConfig`", lambda: _torchao("Float8WeightOnlyConfig"), "torchao"),
    Way("torchao, `IntxWeightOnlyConfig`", lambda: _torchao("IntxWeightOnlyConfig"), "torchao"),
    Way("bitsandbytes, `load_in_4bit`", lambda: _bitsandbytes(load_in_4bit=True), "bitsandbytes"),
    Way(
        'bitsandbytes, `load_in_4bit`, `bnb_4bit_quant_type="nf4"`, `bnb_4bit_use_double_quant`',
        lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "bitsandbytes",
    ),
    Way(
        "bitsandbytes, `load_in_8bit`, `llm_int8_threshold=0.0`",
        lambda: _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
        "bitsandbytes",
    ),
    Way(
        "bitsandbytes, `load_in_8bit` as it is",
        lambda: _bitsandbytes(load_in_8bit=True),
        "bitsandbytes",
        OUTLIERS,
    ),
    Way("optimum-quanto, `int8`", lambda: _quanto("int8"), "optimum.quanto"),
    Way("optimum-quanto, `int4`", lambda: _quanto("int4"), "optimum.quanto"),
    Way(
        "compressed-tensors, `CompressedTensorsConfig(dequantize=True)`",
        lambda: loaded(_compressed(), quantization_config=CompressedTensorsConfig(dequantize=True)),
        "compressed_tensors",
    ),
    Way("compressed-tensors as it is", lambda: loaded(_compressed()), "compressed_tensors", UNPACKED_LATE),
    Way("GPTQ, loaded with GPTQModel", lambda: loaded(_packed("gptq")), "gptqmodel"),
    Way("AWQ, loaded with GPTQModel", lambda: loaded(_packed("awq")), "gptqmodel"),
]
