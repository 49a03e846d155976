"""Quantised models: their modules multiply, and the result is that of the same model unwrapped, or a refusal."""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AwqConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    GPTQConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

import compiled_llm
from support.docs.pages import DOCS
from support.huggingface.pairs import OPTIONS
from support.packed_layers import fp8_blocks, packed_model
from support.parity import greedy, mixed_prompts
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
    ours: bool | None = False  # whether kernels of ours multiply; None if the library's choice decides it
    rounds: float = 0  # how far off logits are since the library rounds activations where our kernels do not
    like: Callable[[], PreTrainedModel] | None = None  # makes it unpacked, if it cannot run unwrapped
    cuda: str = ""  # what has run on a GPU

    def __str__(self) -> str:
        return self.name

    def refuses(self, mode: str) -> bool:
        return bool(self.refused) and mode in self.modes

    @property
    def row(self) -> str:
        served = "✓ by the call" if self.by_call else "✓"
        modes = " | ".join("refused" if self.refuses(mode) else served for mode in MODES)
        kernels = {True: "ours", False: "the library's", None: "by the library's choice"}[self.ours]
        refused = all(map(self.refuses, MODES))
        kernels = "—" if self.plain or refused else kernels
        cuda = "—" if refused else self.cuda or ("as plain weights" if self.plain else "not tried")
        return f"| {self.name} | {modes} | {kernels} | {cuda} |"


def model(seed: int = 0) -> PreTrainedModel:
    return tiny_llama(seed, eos_token_id=None, num_hidden_layers=2)


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
    """Without the kernel of some processors, which rounds to 16 bits, and packs weights anew in the first call."""
    made = loaded(folder(), quantization_config=BitsAndBytesConfig(**options))
    for module in made.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return made  # type: ignore[no-any-return]


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
def _compressed(seed: int = 0) -> str:
    """Four bits a weight, by compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    path, compressed = tempfile.mkdtemp(), model(seed)
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


def _left_packed(path: str = "") -> PreTrainedModel:
    """The hook by which a first call unpacks all weights is taken away; it can no longer run unwrapped then."""
    made = loaded(path or _compressed())
    made.ct_decompress_hook.remove()
    del made.ct_decompress_hook
    return made  # type: ignore[no-any-return]


@cache
def _fp8() -> str:
    """Eight bits a weight, as transformers stores them."""
    path, packed = tempfile.mkdtemp(), packed_model(model(), fp8_blocks)
    packed.config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": ["lm_head"],
    }
    packed.save_pretrained(path)
    return path


def _from_fp8(gpu: bool) -> PreTrainedModel:
    """On a CPU; beside no GPU, transformers unpacks FP8 as it loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        return loaded(_fp8(), device_map="cpu")  # type: ignore[no-any-return]


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
UNPACKED_LATE = r"Llama\S+ has a hook of compressed-tensors.*CompressedTensorsConfig\(dequantize=True\).*remove\(\)"
OUTLIERS = r"q_proj is a bitsandbytes\S+, which looks for outliers .*llm_int8_threshold=0.0"
COMPILED = frozenset({"compile"})

WAYS = [
    Way("`torch.ao.quantization.quantize_dynamic`", lambda: _dynamic({nn.Linear}), "", PACKED, COMPILED, by_call=True),
    Way("the same, `lm_head` alone", lambda: _dynamic({"lm_head"}), "", PACKED, COMPILED, by_call=True),
    Way("a GGUF file, unpacked by transformers", _from_gguf, plain=True),
    Way("FP8 by blocks of transformers, loaded where no GPU is", lambda: _from_fp8(False), plain=True, cuda="—"),
    Way(
        "the same, loaded where one is",
        lambda: _from_fp8(True),
        ours=True,
        cuda="random weights",
        like=lambda: _from_fp8(False),
    ),
    Way(
        "torchao, `Int8WeightOnlyConfig`",
        lambda: _torchao("Int8WeightOnlyConfig"),
        "torchao",
        ours=True,
        cuda="packed by the library",
    ),
    Way(
        "the same with `include_input_output_embeddings`",
        lambda: _torchao("Int8WeightOnlyConfig", include_input_output_embeddings=True),
        "torchao",
        ours=True,
    ),
    Way(
        "torchao, `Int8DynamicActivationInt8WeightConfig`",
        lambda: _torchao("Int8DynamicActivationInt8WeightConfig"),
        "torchao",
    ),
    Way("torchao, `Float8WeightOnlyConfig`", lambda: _torchao("Float8WeightOnlyConfig"), "torchao", ours=True),
    Way("torchao, `IntxWeightOnlyConfig`", lambda: _torchao("IntxWeightOnlyConfig"), "torchao"),
    Way(
        "bitsandbytes, `load_in_4bit`",
        lambda: _bitsandbytes(load_in_4bit=True),
        "bitsandbytes",
        cuda="packed by the library",
    ),
    Way(
        'bitsandbytes, `load_in_4bit`, `bnb_4bit_quant_type="nf4"`, `bnb_4bit_use_double_quant`',
        lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "bitsandbytes",
        ours=True,
        cuda="packed by the library",
    ),
    Way(
        "bitsandbytes, `load_in_8bit`, `llm_int8_threshold=0.0`",
        lambda: _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
        "bitsandbytes",
        ours=True,
        cuda="packed by the library",
        rounds=0.3,
    ),
    Way("bitsandbytes, `load_in_8bit` as it is", lambda: _bitsandbytes(load_in_8bit=True), "bitsandbytes", OUTLIERS),
    Way("optimum-quanto, `int8`", lambda: _quanto("int8"), "optimum.quanto"),
    Way("optimum-quanto, `int4`", lambda: _quanto("int4"), "optimum.quanto"),
    Way(
        "compressed-tensors, `CompressedTensorsConfig(dequantize=True)`",
        lambda: loaded(_compressed(), quantization_config=CompressedTensorsConfig(dequantize=True)),
        "compressed_tensors",
        plain=True,
    ),
    Way("compressed-tensors as it is", lambda: loaded(_compressed()), "compressed_tensors", UNPACKED_LATE),
    Way(
        "compressed-tensors, `pack-quantized`, without its hook",
        _left_packed,
        "compressed_tensors",
        ours=True,
        cuda="random weights",
        like=lambda: loaded(_compressed()),
    ),
    Way("GPTQ, loaded with GPTQModel", lambda: loaded(_packed("gptq")), "gptqmodel", ours=None),
    Way(
        'the same, `GPTQConfig(bits=4, backend="gptq_torch")`',
        lambda: loaded(_packed("gptq"), quantization_config=GPTQConfig(bits=4, backend="gptq_torch")),
        "gptqmodel",
        ours=True,
        cuda="random weights",
        rounds=0.03,  # to float16
    ),
    Way("AWQ, loaded with GPTQModel", lambda: loaded(_packed("awq")), "gptqmodel", ours=None),
    Way(
        'the same, `AwqConfig(bits=4, backend="torch_awq")`',
        lambda: loaded(_packed("awq"), quantization_config=AwqConfig(bits=4, backend="torch_awq")),
        "gptqmodel",
        ours=True,
        cuda="random weights",
        rounds=0.03,  # to float16
    ),
]


PAGE = DOCS / "reference" / "compatibility.md"
PROMPTS = mixed_prompts([5, 3], 128, seed=0)
UNPADDED = mixed_prompts([4, 4], 128, seed=0)
"""For numbers: the last bits that padding changes become whole steps where activations have eight bits."""


def installed(package: str) -> bool:
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def cases() -> list[Any]:
    """Those of a package that is not here are skipped: transformers would import it in all other tests too."""
    return [pytest.param(way, mode, id=f"{way}, {mode}", marks=marks(way, mode)) for way in WAYS for mode in MODES]


def marks(way: Way, mode: str) -> list[pytest.MarkDecorator]:
    known = mode == "compile" and (way.plain or (way.like is not None and not way.needs))  # as others' weights are
    whole = [pytest.mark.whole] if known else []
    return [*whole, pytest.mark.skipif(not installed(way.needs), reason=f"no {way.needs}")]


@cache
def unwrapped(way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the model as it is, and last logits."""
    plain: Any = (way.like or way.load)()
    with torch.no_grad():
        return greedy(plain, PROMPTS, 8), plain(**UNPADDED).logits[:, -1]


@pytest.mark.drawn(most=4)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("way", "mode"), cases())
def test_a_quantised_model_gives_huggingfaces_tokens_or_is_refused_by_the_name_of_the_module(
    way: Way, mode: str
) -> None:
    tokens, logits = unwrapped(way)
    model: Any = way.load()
    options = {**OPTIONS, "mode": mode, "fuse_projections": mode == "compile" or None}
    if way.refuses(mode):
        with pytest.raises(compiled_llm.UnsupportedModelError, match=f"wrap: \\S*({way.refused})"):
            compiled_llm.wrap(model, **options)
    else:
        compiled_llm.wrap(model, **options)
        torch.testing.assert_close(greedy(model, PROMPTS, 8), tokens)
        assert model.compiled.stats().generate_calls == {"fast loop": 1}
        ours = any("compiled_llm" in kernels for kernels in model.compiled.stats().weights)
        assert ours is (ours if way.ours is None else way.ours)
        with torch.no_grad():
            near = way.rounds or 1e-4
            torch.testing.assert_close(model(**UNPADDED).logits[:, -1], logits, rtol=near, atol=near)
        compiled_llm.unwrap(model)
    if way.like is None:
        torch.testing.assert_close(greedy(model, PROMPTS, 8), tokens)


OURS = [
    pytest.param(way, id=str(way), marks=pytest.mark.skipif(not installed(way.needs), reason=f"no {way.needs}"))
    for way in WAYS
    if way.ours and way.like is None
]


@pytest.mark.parametrize("way", OURS)
def test_packed_false_leaves_products_to_the_library(way: Way) -> None:
    tokens, logits = unwrapped(way)
    model: Any = way.load()
    compiled_llm.wrap(model, **OPTIONS, packed=False)
    torch.testing.assert_close(greedy(model, PROMPTS, 8), tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(**UNPADDED).logits[:, -1], logits, rtol=1e-4, atol=1e-4)
    assert model.compiled.stats().weights == {}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=str(way), marks=pytest.mark.skipif(not installed(way.needs), reason=f"no {way.needs}"))
        for way in WAYS
        if not (way.plain or way.refuses("eager") or way.like)
    ],
)
@torch.no_grad()
def test_rows_change_each_other_exactly_where_the_page_says_so(way: Way) -> None:
    """In the quantised model as it is."""
    model, rows = way.load(), mixed_prompts([9, 9, 9, 9], 128, seed=0)["input_ids"]
    alone = torch.cat([model(row[None]).logits for row in rows])
    assert torch.allclose(model(rows).logits, alone, rtol=1e-3, atol=1e-3) != way.by_call


@pytest.mark.skipif(not installed("compressed_tensors"), reason="no compressed_tensors")
def test_new_weights_of_compressed_tensors_are_written_over_packed_ones() -> None:
    expected = greedy(loaded(_compressed(1)), PROMPTS, 8)
    own: Any = compiled_llm.wrap(_left_packed(), **OPTIONS)
    assert not torch.equal(greedy(own, PROMPTS, 8), expected)
    with compiled_llm.Engine(own, tokenizer=None) as engine:
        engine.update_weights(_compressed(1))
    torch.testing.assert_close(greedy(own, PROMPTS, 8), expected)


@pytest.mark.skipif(not installed("bitsandbytes"), reason="no bitsandbytes")
def test_an_adapter_is_merged_into_packed_weights_as_without_us() -> None:
    """PEFT unpacks a weight, adds to it, and packs it again."""

    def merged(wrap: bool) -> tuple[Any, Tensor]:
        own: Any = _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        if wrap:
            greedy(compiled_llm.wrap(own, **OPTIONS), PROMPTS, 8)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return own, greedy(peft.get_peft_model(own, config).merge_and_unload(), PROMPTS, 8)

    (own, tokens), (plain, expected) = merged(True), merged(False)
    assert torch.equal(tokens, expected)
    weights = [model.model.layers[0].self_attn.q_proj.weight for model in (own, plain)]
    assert torch.equal(weights[0].data, weights[1].data)
    assert torch.equal(weights[0].quant_state.absmax, weights[1].quant_state.absmax)


def test_packed_weights_can_be_wrapped_again() -> None:
    """They cannot be compared, which what torch keeps of fake ops would do."""
    model: Any = WAYS[0].load()
    for _ in range(2):
        compiled_llm.wrap(model, **OPTIONS)
        greedy(model, PROMPTS, 2)
        compiled_llm.unwrap(model)


def test_the_page_has_a_row_for_each_way_to_quantise() -> None:
    section = PAGE.read_text().partition("## Quantised models")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \|$", section, re.MULTILINE)
    assert rows[1:] == [way.row for way in WAYS]


class Replacing(nn.Linear):
    """Multiplies by another weight that it puts in place of its own, as those of compressed-tensors do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.weight.data
        self.weight.data = own * 1
        return super().forward(input)


def test_weights_that_are_replaced_while_the_model_is_tried_are_its_own_again() -> None:
    """On tensors without memory they lose their values, which then is a refusal."""
    model: Any = tiny_llama(num_hidden_layers=1)
    expected, weight = greedy(model, PROMPTS, 4), model.lm_head.weight
    model.lm_head.__class__ = Replacing
    with pytest.raises(compiled_llm.UnsupportedModelError, match="cannot be traced with packed tokens"):
        compiled_llm.wrap(model, **OPTIONS)
    assert model.lm_head.weight is weight
    torch.testing.assert_close(greedy(model, PROMPTS, 4), expected)


class Params4bit(nn.Parameter):
    """As that of bitsandbytes."""

    quant_state = None


class PackedLate(nn.Linear):
    """Gives its weight another form in the first call, as four bits of bitsandbytes on a CPU."""

    packed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if not getattr(weight, "packed", False):
            weight.data, weight.packed = weight.data.T.contiguous(), True
        return nn.functional.linear(input, self.weight.T)


def test_weights_that_a_first_call_packs_anew_are_packed_from_their_values() -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    expected = greedy(model, PROMPTS, 4)
    model.lm_head.weight = Params4bit(model.lm_head.weight.detach().clone())
    model.lm_head.__class__ = PackedLate
    compiled_llm.wrap(model, **OPTIONS)
    torch.testing.assert_close(greedy(model, PROMPTS, 4), expected)


class Turned(nn.Linear):
    """Looks at its weight in its own way, as a library's layers do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight.view(-1).view(self.out_features, self.in_features))


def test_weights_that_are_a_subclass_of_parameter_are_tried_without_data() -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    expected, head = greedy(model, PROMPTS, 4), model.lm_head
    own: Any = type("OwnParameter", (nn.Parameter,), {})  # as bitsandbytes' weights of 8 bits
    head.weight, head.__class__ = own(head.weight.detach().clone()), Turned
    compiled_llm.wrap(model, **OPTIONS)
    torch.testing.assert_close(greedy(model, PROMPTS, 4), expected)
    assert "refused" not in str(compiled_llm.explain(model))
