"""Models whose linear layers another library has packed: programs multiply by our op, all else sees these layers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.model.sizes import matrix_bytes, weights_of_a_layer
from compiled_llm.model.version.tensors import tensors_of
from support import packed_layers
from support.huggingface.pairs import OPTIONS
from support.packed_layers import (
    PACK,
    CompressedLinear,
    Float8Tensor,
    Linear4bit,
    MatmulLtState,
    ao_float8,
    ao_int8,
    bnb_int8,
    bnb_nf4,
    ct_packed,
    fp8_blocks,
    gptq,
    packed_model,
    unpacked_model,
    values_of,
)
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_llama

PROMPTS = mixed_prompts([5, 3], 128, seed=0)
LAYERS = 14
"""Linear layers inside the two layers of a tiny model."""


def model(layers: int = 2) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None, num_hidden_layers=layers)


def packed(pack: Callable[[nn.Linear], nn.Module] = gptq, layers: int = 2) -> Any:
    return packed_model(model(layers), pack)


def packed_for(mode: str, pack: Callable[[nn.Linear], nn.Module]) -> Any:
    """A model of one layer where it is traced: each takes as long again."""
    return packed(pack, 1 if mode == "compile" else 2)


def wrapped(own: Any, **options: Any) -> Any:
    return compiled_llm.wrap(own, **{**OPTIONS, **options})


def answer(own: Any) -> Any:
    return greedy(own, PROMPTS, 8)


def weights_of(own: Any) -> dict[str, int]:
    found: dict[str, int] = own.compiled.stats().weights
    return found


@pytest.mark.drawn(most=8)
@pytest.mark.parametrize("name", PACK)
def test_tokens_are_those_of_the_model_unpacked(name: str) -> None:
    format, pack = PACK[name]
    own = packed(pack)
    expected = answer(unpacked_model(own))
    wrapped(own, packed=True)
    assert torch.equal(answer(own), expected)
    assert weights_of(own) == {f"{format}: compiled_llm": LAYERS}
    assert own.compiled.stats().generate_calls == {"fast loop": 1}


COMPILED = [
    pytest.param(name, marks=() if name in ("transformers, blocks", "torchao, int4") else pytest.mark.whole)
    for name in PACK
]


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_give_the_same_tokens(name: str) -> None:
    own = packed_for("compile", PACK[name][1])
    expected = answer(unpacked_model(own))
    wrapped(own, mode="compile")
    assert torch.equal(answer(own), expected)
    assert torch.equal(answer(own), expected)
    assert own.compiled.stats().recompiles == 0


@pytest.mark.parametrize("name", PACK)
def test_a_packed_layer_has_as_many_weights_as_unpacked_and_the_bytes_that_it_has(name: str) -> None:
    """Which prefills are captured follows from the first, and which steps are mixed from the second."""
    own = packed(PACK[name][1])
    plain = unpacked_model(own)
    assert weights_of_a_layer(own, 2) == weights_of_a_layer(plain, 2)
    shadows = sum(module.stands_for.nbytes for module in own.modules() if hasattr(module, "stands_for"))
    shadows += sum(weight.values.nbytes for weight in own.parameters() if hasattr(weight, "qdata"))
    share = (matrix_bytes(own) - shadows) / matrix_bytes(plain)
    assert 0.1 < share < (16 if "tiles" in name else 0.7)  # tiles are filled up to 1,024 inputs


def test_packed_false_leaves_all_to_the_library(called: list[torch.Tensor]) -> None:
    own = packed(bnb_nf4)
    wrapped(own, packed=False)
    answer(own)
    assert called
    assert weights_of(own) == {}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs of the library's products, as they are made."""
    inputs, product = list[torch.Tensor](), packed_layers.product

    def noted(input: torch.Tensor, *others: Any) -> torch.Tensor:
        inputs.append(input)
        return product(input, *others)

    monkeypatch.setattr(packed_layers, "product", noted)
    return inputs


# ---- the user's model


def test_the_model_is_what_it_was_for_everybody_else(called: list[torch.Tensor]) -> None:
    own = packed()
    modules, state = dict(own.named_modules()), {name: tensor.clone() for name, tensor in own.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in modules.items()}
    wrapped(own)
    answer(own)
    assert not called
    assert {name: module for name, module in own.named_modules()} == modules  # noqa: C416
    for name, module in modules.items():
        if name:
            assert all(vars(module)[key] is value for key, value in attributes[name].items())
    assert own.state_dict().keys() == state.keys()
    assert all(torch.equal(own.state_dict()[name], tensor) for name, tensor in state.items())
    own.model(PROMPTS["input_ids"])  # HuggingFace's way
    assert len(called) == LAYERS
    compiled_llm.unwrap(own)
    assert type(own) is type(model())
    answer(own)
    assert len(called) > LAYERS


@pytest.mark.drawn(most=5)
@pytest.mark.parametrize("name", PACK)
def test_what_others_read_of_a_wrapped_model_has_the_bits_that_it_had(name: str, tmp_path: Path) -> None:
    own, runs, saves = packed(PACK[name][1], layers=1), "transformers" not in name, "torchao" not in name
    states = own.model(PROMPTS["input_ids"])[0] if runs else None
    before, names = numbers_of(own), [*own.state_dict()]
    if saves:
        own.save_pretrained(tmp_path / "before")
    wrapped(own, packed=True)
    answer(own)
    assert [*own.state_dict()] == names
    for read in (own, copy.deepcopy(own), compiled_llm.unwrap(copy.deepcopy(own))):
        assert all(map(torch.equal, numbers_of(read), before))
        assert states is None or torch.equal(read.model(PROMPTS["input_ids"])[0], states)
    if saves:
        own.save_pretrained(tmp_path / "after")
        files = [(tmp_path / when / "model.safetensors").read_bytes() for when in ("before", "after")]
        assert files[0] == files[1]


def numbers_of(own: Any) -> list[torch.Tensor]:
    """All numbers that the library has, as they are now."""
    found = [tensor for module in own.modules() for tensor in tensors_of(module) if not is_wrapper(tensor)]
    return [tensor.detach().clone() for tensor in found]


def test_a_copy_of_a_wrapped_model_has_stand_ins_of_its_own() -> None:
    own = wrapped(packed())
    expected = answer(own)
    copied = copy.deepcopy(own)
    with torch.no_grad():
        own.model.layers[0].mlp.up_proj.scales.mul_(-1)
    assert torch.equal(answer(copied), expected)
    assert weights_of(copied) == weights_of(own)
    assert not torch.equal(answer(own), expected)


def test_hooks_of_packed_layers_are_called() -> None:
    own = wrapped(packed())
    seen = list[torch.Size]()

    def look(module: nn.Module, args: object, output: torch.Tensor, step: object) -> None:
        seen.append(output.shape)

    handle = compiled_llm.traced_hook(own.model.layers[1].mlp.down_proj, look)
    answer(own)
    assert seen[0][-1] == own.config.hidden_size
    handle.remove()


# ---- writes, and other weights


def scaled(module: Any) -> None:
    with torch.no_grad():
        module.weight_scale.mul_(-1)
    module.stands_for.neg_()


def in_dataclass(module: Any) -> None:
    assert isinstance(module.state, MatmulLtState)
    own = module.state.SCB if module.state.SCB is not None else module.weight.SCB
    own.neg_()
    module.stands_for.neg_()


def in_state(module: Any) -> None:
    assert isinstance(module, Linear4bit)
    module.weight.quant_state.state2.absmax.neg_()
    module.weight.quant_state.offset.neg_()
    module.stands_for.neg_()


def other_state(module: Any) -> None:
    module.weight.quant_state.absmax = -module.weight.quant_state.absmax
    module.stands_for.neg_()


def inside(module: Any) -> None:
    module.weight.scale.neg_()
    module.weight.values.neg_()


def another_inside(module: Any) -> None:
    module.weight.scale = -module.weight.scale
    module.weight.values = -module.weight.values


def another_weight(module: Any) -> None:
    weight = module.weight
    other = Float8Tensor(-weight.values, qdata=weight.qdata, scale=-weight.scale, act_quant_kwargs=None)
    module.weight = nn.Parameter(other, requires_grad=False)


def data(module: Any) -> None:
    module.scales.data = -module.scales
    module.stands_for.neg_()


WRITES: dict[str, tuple[Callable[[nn.Linear], nn.Module], Callable[[Any], None]]] = {
    "into a parameter": (ct_packed, scaled),
    "into a dataclass of the module": (bnb_int8, in_dataclass),
    "into the scales of scales": (lambda linear: bnb_nf4(linear, nested=True), in_state),
    "another tensor in a weight's state": (bnb_nf4, other_state),
    "into a tensor inside a weight": (ao_float8, inside),
    "another tensor inside a weight": (ao_int8, another_inside),
    "another weight": (ao_float8, another_weight),
    "other memory": (gptq, data),
}


def modes(name: str) -> list[Any]:
    return [(name, "eager"), pytest.param(name, "compile", marks=() if name in ALWAYS else pytest.mark.whole)]


ALWAYS = ("into a tensor inside a weight", "another tensor in a weight's state")


@pytest.mark.drawn(most=2)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("name", "mode"), [case for name in WRITES for case in modes(name)])
def test_writes_into_packed_weights_are_noticed(name: str, mode: str) -> None:
    pack, write = WRITES[name]
    own = wrapped(packed_for(mode, pack), mode=mode)
    before = answer(own)
    write(own.model.layers[0].mlp.up_proj)
    write(own.model.layers[-1].self_attn.v_proj)
    expected = answer(unpacked_model(compiled_llm.unwrap(copy.deepcopy(own))))
    assert not torch.equal(before, expected)
    assert torch.equal(answer(own), expected)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_a_layer_that_can_no_longer_be_read_is_its_library_s_again(mode: str) -> None:
    own = wrapped(packed_for(mode, bnb_nf4), mode=mode)
    before = answer(own)
    layers = own.model.layers
    for layer in layers:
        state = layer.mlp.gate_proj.weight.quant_state
        state.packing_format_for_cpu, state.absmax = True, state.absmax.clone()
    assert torch.equal(answer(own), before)
    assert weights_of(own) == {
        "nf4-g64: compiled_llm": 6 * len(layers),
        "nf4: its library (a call has packed it anew for this processor)": len(layers),
    }


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
@pytest.mark.parametrize("by", ["attribute", "class"])
def test_a_forward_that_is_replaced_in_a_packed_layer_counts_until_it_is_taken_away(by: str, mode: str) -> None:
    def first(input: torch.Tensor) -> torch.Tensor:
        return input[..., :64]

    own = wrapped(packed_for(mode, gptq), mode=mode)
    before, layer = answer(own), own.model.layers[0].mlp.down_proj
    kind = type(layer)
    if by == "attribute":
        layer.forward = first
    else:
        layer.__class__ = type("Other", (kind,), {"forward": lambda self, input: first(input)})
    other = unpacked_model(packed_for(mode, gptq))
    other.model.layers[0].mlp.down_proj.forward = first
    expected = answer(other)
    assert not torch.equal(before, expected)
    assert torch.equal(answer(own), expected)
    assert weights_of(own)["int4-g32: compiled_llm"] == 7 * len(own.model.layers) - 1
    if by == "attribute":
        del layer.forward
    else:
        layer.__class__ = kind
    assert torch.equal(answer(own), before)


class TwiceLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class TwiceLinear4bit(Linear4bit):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(("kind", "pack"), [(TwiceLinear, ao_int8), (TwiceLinear4bit, bnb_nf4)])
def test_a_layer_of_its_own_class_runs_its_own_forward(kind: type[nn.Module], pack: Any) -> None:
    """From the first on, and where its class is replaced later."""
    own, other = packed(pack), unpacked_model(packed(pack))
    own.model.layers[0].mlp.down_proj.__class__ = kind
    other.model.layers[0].mlp.down_proj.__class__ = TwiceLinear
    assert torch.equal(answer(wrapped(own)), answer(other))
    own.model.layers[1].self_attn.q_proj.__class__ = kind
    other.model.layers[1].self_attn.q_proj.__class__ = TwiceLinear
    assert torch.equal(answer(own), answer(other))
    ours, left = weights_of(own).items()
    assert (ours[1], left[1]) == (LAYERS - 2, 2)
    assert left[0].endswith(f": its library ({torch.typename(kind)} is a class of its own)")


def test_a_forward_that_is_put_into_the_library_s_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = packed(bnb_nf4), unpacked_model(packed(bnb_nf4))
    assert torch.equal(answer(wrapped(own)), answer(other))
    original = Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda self, input: 2 * original(self, input))
    for layer in other.model.layers.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = TwiceLinear
    assert torch.equal(answer(own), answer(other))
    assert [*weights_of(own).values()] == [LAYERS]
    assert "nf4-g64: its library (its forward was replaced)" in weights_of(own)


class PackedLate(Linear4bit):
    """Gives its weight other memory in each call, as those of libraries do that unpack it, or pack it anew."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(input)


@pytest.mark.parametrize(
    ("pack", "kind"), [(bnb_nf4, Linear4bit), (bnb_nf4, PackedLate), (ct_packed, CompressedLinear)]
)
def test_a_packed_head_keeps_its_weights(pack: Any, kind: type[nn.Module]) -> None:
    own = packed_model(model(), pack, head=True)
    expected, before = answer(unpacked_model(own)), {name: weight.clone() for name, weight in own.named_parameters()}
    own.lm_head.__class__ = kind
    out = wrapped(own).generate(
        **PROMPTS, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert {logits.shape[-1] for logits in out.logits} == {128}
    compiled_llm.unwrap(own)
    assert all(torch.equal(weight, before[name]) for name, weight in own.named_parameters())
    assert torch.equal(answer(own), expected)


def test_a_plain_layer_in_the_place_of_a_packed_one() -> None:
    own = wrapped(packed())
    answer(own)
    mlp = own.model.layers[0].mlp
    values = values_of(mlp.down_proj)
    mlp.down_proj = nn.Linear(values.shape[1], values.shape[0], bias=False)
    mlp.down_proj.weight.data = -values
    expected = answer(unpacked_model(compiled_llm.unwrap(copy.deepcopy(own))))
    assert torch.equal(answer(own), expected)
    assert weights_of(own) == {"int4-g32: compiled_llm": LAYERS - 1}


# ---- refused


def test_packed_true_refuses_a_layer_without_reader_by_its_name() -> None:
    own = packed(bnb_nf4)
    own.model.layers[1].mlp.up_proj.weight.quant_state.quant_type = "fp4"
    expected = answer(own)
    with pytest.raises(compiled_llm.UnsupportedModelError, match=r"1\.mlp\.up_proj, a .*Linear4bit, .*: fp4, has"):
        wrapped(own, packed=True)
    assert torch.equal(answer(own), expected)
    wrapped(own)
    assert torch.equal(answer(own), expected)
    assert weights_of(own)["fp4: its library (has no reader)"] == 1


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_scales_that_are_not_finite_are_refused(number: float) -> None:
    own = packed(fp8_blocks)
    scales = own.model.layers[1].mlp.up_proj.weight_scale_inv
    before = scales[0, 1].item()
    scales.data[0, 1] = number
    with pytest.raises(compiled_llm.UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj of Llama.* not finite"):
        wrapped(own)
    scales.data[0, 1] = before
    expected = answer(unpacked_model(own))
    assert torch.equal(answer(wrapped(own)), expected)
    with torch.no_grad():
        scales[0, 1] = number
    with pytest.raises(compiled_llm.UnsupportedModelError, match="not finite"):
        answer(own)
    with torch.no_grad():
        scales[0, 1] = before
    assert torch.equal(answer(own), expected)


def test_outliers_of_eight_bits_are_refused_as_before() -> None:
    own = packed(bnb_int8)
    own.model.layers[0].mlp.up_proj.state.threshold = 6.0
    with pytest.raises(compiled_llm.UnsupportedModelError, match="looks for outliers above llm_int8_threshold=6"):
        wrapped(own)


def test_batch_invariance_is_refused() -> None:
    with pytest.raises(compiled_llm.UnsupportedModelError, match=r"batch_invariant=True: .* is quantised"):
        wrapped(packed(), mode="compile", batch_invariant=True)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_an_impossible_option_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="packed="):
        wrapped(model(), packed=value)


# ---- what is said


def test_one_line_says_whose_kernels_multiply(caplog: pytest.LogCaptureFixture) -> None:
    own = packed(bnb_nf4)
    own.model.layers[1].mlp.up_proj.weight.quant_state.quant_type = "fp4"
    with caplog.at_level(logging.INFO, "compiled_llm.weights"):
        wrapped(own)
        answer(own)
        answer(own)
    (record,) = [record for record in caplog.records if record.name == "compiled_llm.weights"]
    assert "13 x nf4-g64: compiled_llm, 1 x fp4: its library (has no reader)" in record.getMessage()
    assert record.levelno == logging.WARNING
    assert "packed weights" in str(own.compiled.stats())


def test_a_plain_model_has_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "compiled_llm.weights"):
        own = wrapped(model(), packed=True)
    assert own.compiled.facts.stand_ins is None
    assert weights_of(own) == {}
    assert not caplog.records


@pytest.mark.whole
def test_explain_takes_a_packed_model_and_says_what_it_has() -> None:
    report = compiled_llm.explain(packed(fp8_blocks, layers=1))
    assert report.clean, report
    assert report.data["programs"]["prefill"]["calls"]["compiled_llm.packed_linear.default"] == LAYERS // 2
    assert report.data["packed_weights"] == {"fp8-block32: compiled_llm": LAYERS // 2}
    assert f"{LAYERS // 2} fp8-block32: compiled_llm" in str(report)
