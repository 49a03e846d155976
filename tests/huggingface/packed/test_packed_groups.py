"""Packed layers that read one input are one product in programs, their weights side by side in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import compiled_llm
from compiled_llm import Engine
from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.compilation import backend
from compiled_llm.execution.lifecycle import runner_lifecycle
from compiled_llm.model.packed.groups import are_one, can_be_one, lay_out, separate
from compiled_llm.model.packed.readers import torchao
from compiled_llm.model.packed.reading import ReadWeight, as_parameters
from compiled_llm.model.packed.stand_in_linear import Member, StandInLinear
from compiled_llm.model.version.tensors import tensors_of
from compiled_llm_ops.packed.unpack import unpack
from support.huggingface.pairs import OPTIONS
from support.packed_layers import (
    ao_float8,
    ao_int4,
    ao_int4_tiles,
    ao_int8,
    awq,
    bnb_int8,
    bnb_nf4,
    ct_packed,
    ct_typed,
    fp8_blocks,
    gptq,
    packed_model,
    unpacked_model,
)
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_llama

PROMPTS = mixed_prompts([5, 3], 128, seed=0)
TOGETHER = 4
"""Products of a layer: of queries, keys and values, of attention's output, and two of the MLP."""
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

PACKS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "FP8 of transformers": fp8_blocks,
    "with scales of e8m0, which are copies": lambda linear: fp8_blocks(linear, scale_fmt="ue8m0"),
    "words of compressed-tensors": ct_packed,
    "with zeros, which are copies": lambda linear: ct_packed(linear, symmetric=False),
    "bytes of compressed-tensors": lambda linear: ct_packed(linear, 8),
    "int8": ct_typed,
    "float8": lambda linear: ct_typed(linear, torch.float8_e4m3fn),
    "NF4 of bitsandbytes": bnb_nf4,
    "int8 of bitsandbytes": bnb_int8,
    "float8 of torchao": ao_float8,
    "int8 of torchao": ao_int8,
    "int4 of torchao": ao_int4,
    "int4 of torchao, in tiles": ao_int4_tiles,
}


@pytest.fixture
def launches() -> list[int]:
    """How many launches of several weights each graph has."""
    return []


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> list[int]:
    """How many products of packed weights that are one tensor each graph has; graphs run as our passes leave them."""
    counted = list[int]()

    def compiled(module: fx.GraphModule, inputs: object, options: object) -> Any:
        ops = torch.ops.compiled_llm.packed_linear.default, torch.ops.compiled_llm.packed_linears.default
        found = [module.graph.find_nodes(op="call_function", target=op) for op in ops]
        assert all(node.kwargs["overlap"] for node in chain(*found)), "each may begin while the previous kernel ends"
        counted.append(len(found[0]))
        launches.append(len(found[1]))
        return module.forward

    monkeypatch.setattr(backend, "compile_with_inductor", compiled)
    return counted


def packed(pack: Callable[[nn.Linear], nn.Module] = ct_packed, seed: int = 0, **options: Any) -> Any:
    return packed_model(tiny_llama(seed, eos_token_id=None, num_hidden_layers=1, **options), pack)


def wrapped(own: Any) -> Any:
    return compiled_llm.wrap(own, **{**OPTIONS, "mode": "compile", "fuse_projections": True})


def answer(own: Any) -> Tensor:
    return greedy(own, PROMPTS, 6)


def expected_of(own: Any) -> Tensor:
    return answer(unpacked_model(compiled_llm.unwrap(copy.deepcopy(own))))


def storages(own: Any, *names: str) -> set[int]:
    """Where the codes of layers lie."""
    layers = [module for name, module in own.named_modules() if name.endswith(names)]
    return {held(layer).untyped_storage().data_ptr() for layer in layers}


def held(layer: nn.Module) -> Tensor:
    """The codes of a layer, as its library has them."""
    held = [tensor for tensor in tensors_of(layer) if not is_wrapper(tensor) and tensor.dtype != torch.float32]
    return max(held, key=Tensor.numel)


def addresses(own: Any) -> set[int]:
    return {tensor.data_ptr() for module in own.modules() for tensor in tensors_of(module)}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", PACKS)
def test_projections_of_one_input_are_one_product_until_the_model_is_unwrapped(name: str, products: list[int]) -> None:
    own = packed(PACKS[name], attention_bias=True)
    expected, before = answer(unpacked_model(own)), tensors(own)
    assert [len(storages(own, *group)) for group in GROUPS] == [3, 2]
    wrapped(own)
    assert torch.equal(answer(own), expected)
    assert set(products) == {TOGETHER}
    assert own.compiled.stats().recompiles == 0
    assert [len(storages(own, *group)) for group in GROUPS] == [1, 1]
    assert all(map(torch.equal, tensors(own), before))
    compiled_llm.unwrap(own)
    assert [len(storages(own, *group)) for group in GROUPS] == [3, 2]
    assert all(map(torch.equal, tensors(own), before))
    codes = held(own.model.layers[0].self_attn.q_proj)
    assert codes.untyped_storage().nbytes() == codes.nbytes


def tensors(own: Any) -> list[Tensor]:
    """All numbers that the library has, as they are now."""
    found = [tensor for module in own.modules() for tensor in tensors_of(module) if not is_wrapper(tensor)]
    return [tensor.detach().clone() for tensor in found]


def nested_nf4(linear: nn.Linear) -> nn.Module:
    return bnb_nf4(linear, nested=True)


def neg_nested(layer: Any) -> None:
    layer.weight.quant_state.state2.absmax.neg_()
    layer.weight.quant_state.offset.neg_()


ANYWHERE: dict[str, tuple[Callable[[nn.Linear], nn.Module], Callable[[Any], object]]] = {
    "GPTQ": (gptq, lambda layer: layer.scales.neg_()),
    "AWQ": (awq, lambda layer: layer.scales.neg_()),
    "NF4 of bitsandbytes, its scales in 8 bits": (nested_nf4, neg_nested),
}
"""What is one launch wherever it lies, and what turns the sign of a weight."""
WORDS = ("GPTQ", "AWQ")
WIDE: dict[str, Any] = {"head_dim": 64, "intermediate_size": 128}
"""Keys and values have 128 outputs then, as the two of the MLP."""


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", ANYWHERE)
def test_weights_are_one_launch_where_they_lie(name: str, launches: list[int], products: list[int]) -> None:
    pack, negate = ANYWHERE[name]
    own = packed(pack, attention_bias=True, **WIDE)
    expected, before = answer(unpacked_model(own)), {**places(own)}
    wrapped(own)
    assert torch.equal(answer(own), expected)
    assert (set(launches), set(products)) == ({2}, {TOGETHER - 2}), "queries, keys and values; and two of the MLP"
    assert places(own) == before
    with torch.no_grad():
        negate(own.model.layers[0].mlp.up_proj)
        own.model.layers[0].mlp.up_proj.stands_for.neg_()
    changed = expected_of(own)
    assert not torch.equal(changed, expected)
    assert torch.equal(answer(own), changed)
    assert own.compiled.stats().recompiles == 0
    compiled_llm.unwrap(own)
    assert places(own) == before


def places(own: Any) -> dict[str, int]:
    """Where all tensors of a model are."""
    return {name: tensor.data_ptr() for name, tensor in [*own.named_parameters(), *own.named_buffers()]}


@pytest.mark.parametrize("name", ANYWHERE)
def test_weights_whose_outputs_a_tile_would_mix_stay_apart(name: str) -> None:
    assert wrapped(packed(ANYWHERE[name][0], intermediate_size=64)).compiled.facts.groups_of_stand_ins == ()


@pytest.mark.parametrize("name", WORDS)
def test_words_that_no_launch_can_read_from_where_they_begin_stay_apart(
    name: str, launches: list[int], products: list[int]
) -> None:
    own = packed(ANYWHERE[name][0], **WIDE)
    layer, expected = own.model.layers[0].mlp.up_proj, answer(unpacked_model(own))
    beside = torch.empty(layer.qweight.numel() + 1, dtype=torch.int32)
    layer.qweight = beside[1:].view_as(layer.qweight).copy_(layer.qweight)
    assert torch.equal(answer(wrapped(own)), expected)
    assert (launches[-1], products[-1]) == (1, TOGETHER)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", WORDS)
def test_a_layer_that_becomes_another_kind_leaves_its_launch(
    name: str, launches: list[int], products: list[int]
) -> None:
    own = wrapped(packed(ANYWHERE[name][0], **WIDE))
    before, layer = answer(own), own.model.layers[0].mlp.up_proj
    layer.scales = layer.scales.float()
    assert torch.equal(answer(own), before)
    assert (launches[-1], products[-1]) == (1, TOGETHER)


@pytest.mark.whole
@pytest.mark.parametrize("name", ANYWHERE)
def test_they_sleep_and_wake(name: str, monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> None:
    monkeypatch.setattr(runner_lifecycle, "is_host", lambda device: False)
    own = wrapped(packed(ANYWHERE[name][0], **WIDE))
    tokens = answer(own)
    with slept(own):
        pass
    assert set(launches) == {2}
    copied: Any = copy.deepcopy(own)
    assert copied.compiled.facts.groups_of_stand_ins == own.compiled.facts.groups_of_stand_ins
    assert torch.equal(answer(copied), tokens)


@contextmanager
def slept(own: Any) -> Iterator[Engine]:
    """An engine that has slept and woken, with weights elsewhere and the same tokens."""
    tokens, before = answer(own), addresses(own)
    with Engine(own, tokenizer=None) as engine:
        engine.sleep(weights=True)
        assert not before & addresses(own)
        engine.wake()
        assert torch.equal(answer(own), tokens)
        yield engine


def test_words_of_8_bits_stay_apart() -> None:
    assert wrapped(packed(lambda linear: gptq(linear, 8), **WIDE)).compiled.facts.groups_of_stand_ins == ()


def test_layers_whose_tiles_are_padded_stay_apart() -> None:
    """12 outputs are padded to two tiles of 8, after which the next layer's would begin."""
    padded, whole = (member_of(ao_int4_tiles(nn.Linear(128, outputs))) for outputs in (12, 16))
    assert can_be_one([whole, padded])
    assert not can_be_one([padded, whole])


def test_tables_of_tiles_are_copied_into_one() -> None:
    layers = [ao_int4_tiles(nn.Linear(1024, outputs, bias=False)) for outputs in (16, 8, 24)]
    group, theirs = [member_of(layer) for layer in layers], [layer.weight.scale_and_zero for layer in layers]
    before = [own.clone() for own in theirs]
    expected = torch.cat([unpack(member.stand_in.weight) for member in group])
    assert not are_one(group)
    assert lay_out(group)
    assert are_one(group)
    first = group[0].stand_in.weight
    tensors = (first.codes, first.scales, first.zeros)
    codes, scales, zeros = (
        own.as_strided([total, *own.shape[1:]], own.stride()) for own, total in zip(tensors, (6, 48, 48), strict=True)
    )
    one = first._replace(codes=codes, scales=scales, zeros=zeros, shape=(48, 1024))
    assert torch.equal(unpack(one), expected)
    assert all(own.is_contiguous() and torch.equal(own, known) for own, known in zip(theirs, before, strict=True))
    assert len({own.untyped_storage().data_ptr() for own in theirs}) == 3
    separate(group)
    assert torch.equal(torch.cat([unpack(member.stand_in.weight) for member in group]), expected)


def member_of(layer: nn.Module) -> Member:
    read = torchao.read(layer)
    assert isinstance(read, ReadWeight)
    return Member(layer, StandInLinear(layer, as_parameters(read)))


def test_copies_of_tables_are_counted_and_follow_what_is_written() -> None:
    own = packed(ao_int4_tiles)
    expected, tables = answer(unpacked_model(own)), own.model.layers[0].mlp.up_proj.weight.scale_and_zero
    wrapped(own)
    assert torch.equal(answer(own), expected)
    grouped = [layer for name, layer in own.named_modules() if name.endswith(tuple(chain(*GROUPS)))]
    assert own.compiled.facts.tables_of_weights == {"tables": sum(one.weight.numel() // 32 * 4 for one in grouped)}
    with torch.no_grad():
        tables.neg_()
        own.model.layers[0].mlp.up_proj.weight.values.neg_()
    changed = expected_of(own)
    assert not torch.equal(changed, expected)
    assert torch.equal(answer(own), changed)


@pytest.mark.whole
def test_weights_that_were_taken_out_are_laid_side_by_side_again(products: list[int]) -> None:
    own = wrapped(packed())
    before = answer(own)
    attention = own.model.layers[0].self_attn
    attention.k_proj.weight_scale.data = -attention.k_proj.weight_scale
    attention.k_proj.stands_for.neg_()
    attention.v_proj.weight_packed.data = attention.v_proj.weight_packed.clone()
    expected = expected_of(own)
    assert not torch.equal(before, expected)
    assert torch.equal(answer(own), expected)
    assert len(storages(own, "q_proj", "k_proj", "v_proj")) == 1
    assert set(products) == {TOGETHER}


@pytest.mark.whole
def test_a_weight_that_somebody_else_holds_stays_where_it_is(products: list[int]) -> None:
    own = packed()
    alias = own.model.layers[0].mlp.up_proj.weight_packed.data
    expected = answer(unpacked_model(own))
    assert torch.equal(answer(wrapped(own)), expected)
    assert set(products) == {TOGETHER + 1}
    assert own.model.layers[0].mlp.up_proj.weight_packed.data_ptr() == alias.data_ptr()


@pytest.mark.whole
def test_a_group_that_can_no_longer_be_one_is_compiled_apart(products: list[int]) -> None:
    own = wrapped(packed())
    before, layer = answer(own), own.model.layers[0].mlp.up_proj
    layer.weight_packed.data = layer.weight_packed.clone()
    alias = layer.weight_packed.data
    assert torch.equal(answer(own), before)
    assert products[-1] == TOGETHER + 1
    assert alias.data_ptr() == layer.weight_packed.data_ptr()
    with torch.no_grad():
        alias.bitwise_not_()
        layer.stands_for.copy_(-layer.stands_for - layer.weight_scale.repeat_interleave(32, 1))
    assert torch.equal(answer(own), expected_of(own))


def test_copies_have_groups_of_their_own() -> None:
    own = wrapped(packed())
    copied: Any = copy.deepcopy(own)
    assert len(copied.compiled.facts.groups_of_stand_ins) == 2
    assert copied.compiled.facts.groups_of_stand_ins == own.compiled.facts.groups_of_stand_ins
    assert not addresses(own) & addresses(copied)


@pytest.mark.whole
def test_groups_sleep_wake_and_take_new_weights(
    monkeypatch: pytest.MonkeyPatch, products: list[int], tmp_path: Path
) -> None:
    """With zeros, of which bytes are made: their groups are laid side by side again."""
    monkeypatch.setattr(runner_lifecycle, "is_host", lambda device: False)
    own, other = (packed(PACKS["with zeros, which are copies"], seed=seed) for seed in (0, 1))
    for one in (own, other):
        one.config.quantization_config = {"quant_method": "compressed-tensors"}
    other.save_pretrained(tmp_path)
    wrapped(own)
    with slept(own) as engine:
        engine.update_weights(tmp_path)
    assert torch.equal(answer(own), answer(unpacked_model(other)))
    assert len(storages(own, "gate_proj", "up_proj")) == 1
    assert set(products) == {TOGETHER}


@pytest.mark.whole
def test_copied_tables_go_while_the_model_sleeps_and_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_lifecycle, "is_host", lambda device: False)
    own = wrapped(packed(ao_int4_tiles))
    tokens, (group, _) = answer(own), own.compiled.facts.groups_of_stand_ins
    members = own.compiled.facts.stand_ins._members(group)
    with Engine(own, tokenizer=None) as engine:
        engine.sleep(weights=True)
        assert all(member.stand_in.scales is None for member in members)
        engine.wake()
        assert torch.equal(answer(own), tokens)
    assert are_one(own.compiled.facts.stand_ins._members(group))
    assert len(storages(own, "q_proj", "k_proj", "v_proj")) == 1
