"""Our ops take over parts of a decode step: norm and position of queries and keys, and sums with their norms."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

import compiled_llm
from compiled_llm.compilation import backend as inductor, programs as programs
from compiled_llm.compilation.backend import Pass
from compiled_llm.compilation.passes import normed_products
from compiled_llm.compilation.passes.attention import PreparedInAttention
from compiled_llm.compilation.passes.normed_products import NormedProducts
from compiled_llm.compilation.passes.norms import NormedSums
from compiled_llm.compilation.passes.patterns import Pattern
from compiled_llm.compilation.passes.products import OuterProducts
from compiled_llm.compilation.program_list import PREFILL
from compiled_llm_ops import cascade_attention, cascade_attention_lse, decode_attention, decode_attention_lse
from compiled_llm_ops.attention.cascade.contract import CascadeAttention
from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.contracts.linear import ChainedLinear
from compiled_llm_ops.protocol import own_decode_ops
from support.compilation.left_uncompiled import leave_uncompiled
from support.compilation.passes_on_a_cpu import let_passes_run_on_a_cpu
from support.compilation.traced import traced
from support.huggingface.families import FAMILIES, make
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import tiny_llama, tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

ATTENTIONS = own_decode_ops().overloads
CASCADES = own_decode_ops().joint


@pytest.fixture(autouse=True)
def decode_passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on CUDA only."""
    let_passes_run_on_a_cpu(monkeypatch)


# ---- whole models


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs of decode steps as Inductor would be given them; they run uncompiled."""
    graphs: list[fx.Graph] = []

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        module.recompile()
        if attentions_in(module.graph):
            graphs.append(module.graph)
        return module.forward

    monkeypatch.setattr(inductor, "compile_with_inductor", noted)
    return graphs


def attentions_in(graph: fx.Graph) -> list[Any]:
    found: list[Any] = [node for node in graph.nodes if node.target in ATTENTIONS]
    return [(CascadeAttention if node.target in CASCADES else DecodeAttention)(*node.args) for node in found]


def norms_in(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.compiled_llm.add_rms_norm.default))


def products_in(graph: fx.Graph) -> list[Any]:
    found = graph.find_nodes(op="call_function", target=torch.ops.compiled_llm.normed_linear.default)
    return [node.args for node in found]


def chains_in(graph: fx.Graph) -> list[ChainedLinear]:
    found = graph.find_nodes(op="call_function", target=torch.ops.compiled_llm.chained_linear.default)
    return [ChainedLinear(*node.args) for node in found]


@pytest.fixture
def all_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no two matmuls have kernels together."""
    monkeypatch.setattr(normed_products, "has_chained_kernel", lambda *weights: True)


class Found(NamedTuple):
    """The work of the ops in a step of a model of two layers; ``products`` and ``gated`` where there is one row.

    With more rows, ``chained`` of the products have a matmul in front whose output is added.
    """

    turned: int
    normed: int
    sums: int
    products: int
    gated: int
    chained: int


NORMS_OF_TWO_LAYERS = 4
PRODUCTS_OF_TWO_LAYERS = 3  # the first norm sums nothing, and between the last one and its product a slice is taken
FOUND = {
    "Qwen3": Found(2, 2, NORMS_OF_TWO_LAYERS, PRODUCTS_OF_TWO_LAYERS, 2, PRODUCTS_OF_TWO_LAYERS),
    "Qwen3Moe": Found(2, 2, NORMS_OF_TWO_LAYERS, 1, 0, 0),  # its router reads the norm as well
    "Llama": Found(2, 0, NORMS_OF_TWO_LAYERS, PRODUCTS_OF_TWO_LAYERS, 2, PRODUCTS_OF_TWO_LAYERS),
    "Qwen2": Found(2, 0, NORMS_OF_TWO_LAYERS, PRODUCTS_OF_TWO_LAYERS, 2, PRODUCTS_OF_TWO_LAYERS),
    "Gemma2": Found(2, 0, 0, 0, 0, 0),  # its norm multiplies with one plus the weight
    "Starcoder2": Found(2, 0, 0, 0, 0, 0),  # it subtracts the mean
    # It turns neighbours, a part of each head, and norms what it adds.
    "Glm4": Found(0, 0, NORMS_OF_TWO_LAYERS, PRODUCTS_OF_TWO_LAYERS, 2, 0),
    "Phi3": Found(0, 0, NORMS_OF_TWO_LAYERS, PRODUCTS_OF_TWO_LAYERS, 2, PRODUCTS_OF_TWO_LAYERS),
    "Exaone4": Found(0, 0, 1, 0, 0, 0),  # it norms what it adds
    "GptOss": Found(0, 0, 0, 0, 0, 0),
}


MORE = ("Llama", "Qwen3Moe", "Glm4", "Gemma2", "Qwen2", "Starcoder2", "Phi3", "Exaone4", "GptOss")
"""As far as our ops go, Llama is Qwen3 without norms of heads, the next test says that nothing of GptOss matches, and
what is turned otherwise, as by Glm4, is among the graphs below."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.whole] * (family in MORE)) for family in FOUND]
)
@pytest.mark.usefixtures("all_chained")
def test_what_the_ops_do_in_a_step(family, steps, seed, monkeypatch, whole):
    """What they do in prefills, test_prefill_passes.py has without --whole."""
    if not whole:
        leave_uncompiled(monkeypatch, PREFILL)
    own = {"Qwen3": tiny_qwen3, "Llama": tiny_llama}
    model = own[family](eos_token_id=None) if family in own else make(family, FAMILIES[family], seed)
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    expected = greedy(model, inputs, 12)
    compiled_llm.wrap(model, fuse_projections=True, **FEW_PAGES)
    torch.testing.assert_close(greedy(model, inputs, 12), expected)
    torch.testing.assert_close(greedy(model, {name: column[1:2] for name, column in inputs.items()}, 12), expected[1:2])
    assert len(steps) == 2, "batch 1, and larger ones"
    found = FOUND[family]
    in_prefill = {"rotary in prefill": found.turned} if whole else {}
    assert model.compiled.stats().patterns == {**in_prefill, "rotary": 2 * found.turned, "norm": 2 * found.sums}
    for graph in steps:
        attentions, products, chains = attentions_in(graph), products_in(graph), chains_in(graph)
        turned = sum(attention.cos is not None for attention in attentions)
        normed = sum(attention.query_norm is not None and attention.key_norm is not None for attention in attentions)
        one_row = graph is steps[1]
        gated = sum(product[5] for product in products) + sum(chain.gated for chain in chains)
        sums = norms_in(graph) + len(products) + len(chains)
        here = (
            found._replace(chained=0) if one_row else found._replace(products=0, gated=min(found.gated, found.chained))
        )
        assert Found(turned, normed, sums, len(products), gated, len(chains)) == here
        assert all(attention.overlap for attention in attentions)


@pytest.mark.whole
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(
    ("family", "warned"),
    [("GptOss", 1), *[pytest.param(family, 0, marks=pytest.mark.whole) for family in ("Starcoder2", "Phi3")]],
)
def test_a_model_like_llama_that_matches_nothing_is_told_of_once(family, warned, caplog, seed):
    """Starcoder2 has layer norms, and Phi3 matches in part."""
    model = compiled_llm.wrap(make(family, FAMILIES[family], seed), **FEW_PAGES)
    model.compiled.warmup([2, 4])
    assert ["no pattern of ours matches" in record.message for record in caplog.records].count(True) == warned


# ---- one graph


class Inputs(NamedTuple):
    """Two rows of a layer with 4 query heads, 2 kv heads of size 16; the second begins with ``shared`` pages."""

    states: Tensor
    pages: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    cos: Tensor
    sin: Tensor
    norm: Tensor
    shared: Tensor


def inputs_of() -> Inputs:
    columns = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1], [1, 3], [1, 2])]
    angles = torch.rand(2, 1, 8).repeat(1, 1, 2)
    return Inputs(
        torch.randn(2, 1, 8, 16),
        torch.randn(4, 2, 2, 4, 16),
        *columns,
        angles.cos(),
        angles.sin(),
        torch.rand(16),
        torch.zeros(2, dtype=torch.int32),
    )


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states[..., : states.shape[-1] // 2], states[..., states.shape[-1] // 2 :]
    return states * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def turned_in_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    mates = torch.stack((-states[..., 1::2], states[..., ::2]), dim=-1).flatten(-2)
    return states * cos.unsqueeze(1) + mates * sin.unsqueeze(1)


def turned_in_part(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((turned(states[..., :8], cos[..., :8], sin[..., :8]), states[..., 8:]), dim=-1)


def normed(states: Tensor, weight: Tensor, epsilon: float = 0.01) -> Tensor:
    numbers = states.to(torch.float32)
    variance = numbers.pow(2).mean(-1, keepdim=True)
    return weight * (numbers * torch.rsqrt(variance + epsilon)).to(states.dtype)


def attend(to: Inputs, query: Tensor, key: Tensor, *, lse: bool = False, cascade: bool = False) -> Tensor:
    """``[2, 4, 16]`` from ``[2, heads, 1, 16]``."""
    value = to.states[:, :, 6:].transpose(1, 2)
    packed = [heads.transpose(1, 2).squeeze(1) for heads in (query, key, value)]
    if cascade:
        tables = (to.shared, to.shared, to.shared.new_zeros(1, 6), to.shared.new_zeros(2, 3, 3), 4)
        given = (*packed, to.pages, to.starts, to.lengths, to.indices, *tables, 0.25)
        return cascade_attention_lse(*given)[0] if lse else cascade_attention(*given)
    given = (*packed, to.pages, to.starts, to.lengths, to.indices, 0.25)
    return decode_attention_lse(*given)[0] if lse else decode_attention(*given)


def split(states: Tensor) -> tuple[Tensor, Tensor]:
    return states[:, :, :4], states[:, :, 4:6]


Layer = Callable[[Inputs], Tensor]


def layer_of(
    turn: Callable[..., Tensor] = turned,
    query_norm: float | None = None,
    key_norm: float | None = None,
    key_angles: Callable[[Tensor], Tensor] = lambda cos: cos,
    weights: Callable[[Tensor], Tensor] = lambda norm: norm,
    cascade: bool = False,
) -> Layer:
    """One that turns queries and keys, once they are normed with these epsilons."""

    def layer(to: Inputs) -> Tensor:
        query, key = split(to.states)
        query = query if query_norm is None else normed(query, weights(to.norm), query_norm)
        key = key if key_norm is None else normed(key, to.norm, key_norm)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        turned = turn(query, to.cos, to.sin), turn(key, key_angles(to.cos), to.sin)
        return attend(to, *turned, lse=key_norm is not None, cascade=cascade)

    return layer


def with_keys_read_twice(to: Inputs) -> Tensor:
    query, key = (normed(heads, to.norm).transpose(1, 2) for heads in split(to.states))
    key = turned(key, to.cos, to.sin)
    return attend(to, turned(query, to.cos, to.sin), key) + key.sum()


def of_each_head(norm: Tensor) -> Tensor:
    return norm.expand(4, 16) + torch.arange(4)[:, None]


as_llama = layer_of()
PREPARED: dict[str, tuple[Layer, tuple[bool, bool]]] = {
    "Llama": (as_llama, (False, False)),
    "Qwen3": (layer_of(query_norm=0.01, key_norm=0.01), (True, True)),
    "Llama, shared pages read once": (layer_of(cascade=True), (False, False)),
    "Qwen3, shared pages read once": (layer_of(query_norm=0.01, key_norm=0.01, cascade=True), (True, True)),
    "normed queries": (layer_of(query_norm=0.01), (True, False)),
    "keys that are read twice": (with_keys_read_twice, (True, True)),
    "a norm with a weight for each head": (layer_of(query_norm=0.01, weights=of_each_head), (False, False)),
}
LEFT: dict[str, Layer] = {
    "turned in pairs": layer_of(turned_in_pairs),
    "turned in part": layer_of(turned_in_part),
    "turned differently": layer_of(key_angles=lambda cos: cos * 2),
    "two epsilons": layer_of(query_norm=0.01, key_norm=0.5),
}


def after(searched: list[Pass], function: Callable[..., Tensor], *inputs: Any, **close: float) -> fx.Graph:
    """Return a function's graph after these passes, which change no output."""
    module, given = traced(function, *inputs)
    expected = function(*copy.deepcopy(inputs))
    for each in searched:
        each(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*given)[0], expected, **close)
    return module.graph


def rewritten(layer: Layer) -> tuple[Any, Any]:
    """Return the arguments of a layer's attention after the pass, and the graph."""
    graph = after([PreparedInAttention(own_decode_ops())], layer, inputs_of())
    (attention,) = attentions_in(graph)
    return attention, graph


@pytest.mark.parametrize("name", PREPARED)
def test_norm_and_position_are_left_to_attention(name, seed):
    layer, norms = PREPARED[name]
    attention, graph = rewritten(layer)
    assert attention.cos is not None
    assert attention.sin is not None
    assert (attention.query_norm is not None, attention.key_norm is not None) == norms
    assert attention.epsilon == (0.01 if any(norms) else 0.0)
    assert bool(graph.find_nodes(op="call_function", target=torch.cat)) == (layer is with_keys_read_twice)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_turned_or_normed_otherwise_stays_as_it_is(name, seed):
    attention, _ = rewritten(LEFT[name])
    assert attention.cos is None


@pytest.mark.parametrize("writes_first", [None, "lengths", "shared"])
def test_a_table_is_read_early_unless_it_was_written_before(writes_first, seed):
    attends = layer_of(cascade=writes_first == "shared")

    def layer(to: Inputs) -> Tensor:
        if writes_first:
            getattr(to, writes_first).add_(0)
        out = attends(to)
        to.lengths.add_(1)
        return out

    module, _ = traced(layer, inputs_of())
    PreparedInAttention(own_decode_ops())(module.graph)
    (attention,) = attentions_in(module.graph)
    assert attention.overlap == (writes_first is None)


# ---- sums and norms


def sums_fused(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    return norms_in(after([NormedSums()], function, *inputs, rtol=0, atol=0))


def test_a_chain_of_sums_and_norms_is_fused(seed):
    def layers(states: Tensor, update: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            states = states + update
            update = normed(states, weight) * 2
        return states + update

    assert sums_fused(layers, torch.randn(2, 1, 16), torch.randn(2, 1, 16), torch.rand(16)) == 3


OTHER_NORMS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "a product": lambda x, y, w: normed(x * y, w),
    "a number": lambda x, y, w: normed(x + 1, w) + y,
    "one row added to all": lambda x, y, w: normed(x + y[:1], w),
    "one weight": lambda x, y, w: normed(x + y, w[:1]),
    "a weight of another dtype": lambda x, y, w: normed(x + y, w.double()),
    "an update of another dtype": lambda x, y, w: normed(x + y.double(), w),
    "a factor": lambda x, y, w: normed(x + y, 2.0) + w,  # type: ignore[arg-type]
    "an epsilon that is a tensor": lambda x, y, w: normed(x + y, w, w[0]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("norm", OTHER_NORMS.values(), ids=OTHER_NORMS)
def test_other_norms_stay_as_they_are(norm, seed):
    assert sums_fused(norm, torch.randn(2, 1, 16), torch.randn(2, 1, 16), torch.rand(16)) == 0


def test_what_else_reads_a_part_of_a_norm_still_does(seed):
    def twice(states: Tensor, update: Tensor, weight: Tensor) -> Tensor:
        total = states + update
        numbers = total.to(torch.float32)
        variance = numbers.pow(2).mean(-1, keepdim=True)
        return weight * (numbers * torch.rsqrt(variance + 0.01)).to(states.dtype) + variance + numbers

    assert sums_fused(twice, torch.randn(2, 1, 16), torch.randn(2, 1, 16), torch.rand(16)) == 1


# ---- products of a normed row


def products_of_normed(function: Callable[..., Tensor], *inputs: Tensor) -> list[bool]:
    """Of each product that norms its row, whether it is gated."""
    return [product[5] for product in products_in(after([NormedSums(), NormedProducts()], function, *inputs))]


def row_inputs(rows: int = 1) -> tuple[Tensor, ...]:
    """States, update, norm, and the weight of a product with 12 outputs."""
    return torch.randn(rows, 1, 16), torch.randn(rows, 1, 16), torch.rand(16), torch.randn(12, 16)


linear, silu = torch.nn.functional.linear, torch.nn.functional.silu


def of_a_norm(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    return linear(normed(x + y, norm), weight)


def test_a_product_with_a_weight_of_another_class_stays_its_own(seed):
    """Quantised weights say that they are of 16 bits, and multiply in their own way."""
    from torch.testing._internal.two_tensor import TwoTensor

    *others, weight = row_inputs()
    module, _ = traced(of_a_norm, *others, TwoTensor(weight, weight))
    NormedSums()(module.graph)
    NormedProducts()(module.graph)
    assert norms_in(module.graph) == 1
    assert not products_in(module.graph)


def test_a_product_that_alone_reads_a_norm_norms_it_itself(seed):
    def with_bias(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        return linear(normed(x + y, norm), weight, weight[:, 0])

    def layers(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x + y
            y = linear(linear(normed(x, norm), weight), weight.T.contiguous())
        return x + y

    assert products_of_normed(of_a_norm, *row_inputs()) == [False]
    assert products_of_normed(with_bias, *row_inputs()) == [False]
    assert products_of_normed(layers, *row_inputs()) == [False] * 3


def gated(
    gate: Callable[[Tensor, Tensor], Tensor], outputs: int = 12, bias: bool = False, total: bool = False
) -> Callable[..., Tensor]:
    """A layer that gates one part of so many outputs of a product by another."""

    def layer(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        states = x + y
        product = linear(normed(states, norm), weight, weight[:, 0] if bias else None)
        parts = (torch.narrow(product, -1, start, outputs // 2) for start in (0, outputs // 2))
        out = gate(*(parts if total or outputs < 12 else product.chunk(2, dim=-1)))
        return out + states.sum() if total else out

    return layer


GATES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "chunks": (gated(lambda first, second: second * silu(first)), True),
    "parts": (gated(lambda first, second: silu(first) * second, total=True), True),
    "the other half": (gated(lambda first, second: silu(second) * first), False),
    "another function": (gated(lambda first, second: torch.nn.functional.gelu(first) * second), False),
    "read twice": (gated(lambda first, second: (gate := silu(first)) * second + gate), False),
    "a part of a part": (gated(lambda first, second: silu(first) * second, outputs=8), False),
    "a bias": (gated(lambda first, second: silu(first) * second, bias=True), False),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_both_halves_is_left_to_the_product_in_front(name, seed):
    layer, fused = GATES[name]
    assert products_of_normed(layer, *row_inputs()) == [fused]


def test_other_products_do_not_norm_their_rows(seed):
    def read_twice(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        row = normed(x + y, norm)
        return linear(row, weight) + row.sum()

    def sum_read_in_front(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        total = x + y
        other = total * 2
        return linear(normed(total, norm), weight) + other.sum()

    def with_a_computed_weight(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        return linear(normed(x + y, norm), weight * 1.5)

    def sliced(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        return linear(normed(x + y, norm)[:, -1:], weight)

    for layer in (read_twice, sum_read_in_front, with_a_computed_weight, sliced):
        assert products_of_normed(layer, *row_inputs()) == []
    assert products_of_normed(of_a_norm, *row_inputs(2)) == []


# ---- two products with a normed sum between them


def chained(function: Callable[..., Tensor], *inputs: Tensor) -> list[bool]:
    """Of each second product of two that are one op, whether it is gated."""
    return [chain.gated for chain in chains_in(after([NormedSums(), NormedProducts()], function, *inputs))]


def two_row_inputs() -> tuple[Tensor, ...]:
    """Rows of 8, the weight of a product with 16 outputs, states, norm, and a weight with 12 outputs."""
    return torch.randn(2, 1, 8), torch.randn(16, 8), torch.randn(2, 1, 16), torch.rand(16), torch.randn(12, 16)


def chain(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
    return linear(normed(states + linear(x, first), norm), second)


@pytest.mark.usefixtures("all_chained")
def test_a_product_whose_output_is_added_and_normed_is_one_op_with_the_next(seed):
    def the_other_way(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return linear(normed(linear(x, first) + states, norm), second, second[:, 0])

    def of_two_products(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return linear(normed(linear(x, first) + linear(x * 2, first), norm), second)

    def layers(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        for _ in range(3):
            states = states + linear(x, first)
            gate, other = linear(normed(states, norm), second).chunk(2, dim=-1)
            x = torch.cat([silu(gate) * other, x[..., :2]], -1)
        return states + linear(x, first)

    for layer, found in ((chain, [False]), (the_other_way, [False]), (of_two_products, [False]), (layers, [True] * 3)):
        assert chained(layer, *two_row_inputs()) == found


@pytest.mark.usefixtures("all_chained")
def test_other_products_stay_alone(seed):
    def read_twice(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        update = linear(x, first)
        return linear(normed(states + update, norm), second) + update.sum()

    def with_a_bias(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return linear(normed(states + linear(x, first, first[:, 0]), norm), second)

    def with_a_computed_weight(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return linear(normed(states + linear(x, first * 2), norm), second)

    def scaled(x: Tensor, first: Tensor, states: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return linear(normed(states + linear(x, first) * 2, norm), second)

    for layer in (read_twice, with_a_bias, with_a_computed_weight, scaled):
        assert chained(layer, *two_row_inputs()) == []


def test_products_without_kernels_of_their_own_stay_alone(seed):
    assert chained(chain, *two_row_inputs()) == []


# ---- angles


def test_products_over_one_number_are_multiplications(seed):
    def angles(frequencies: Tensor, positions: Tensor) -> Tensor:
        return (frequencies[None, :, None].float().expand(3, -1, 1) @ positions[:, None, :].float()).transpose(1, 2)

    frequencies, positions = torch.rand(32), torch.randint(40_000, (3, 7))
    graph = after([OuterProducts()], angles, frequencies, positions, rtol=0, atol=0)
    assert not graph.find_nodes(op="call_function", target=operator.matmul)


def test_other_products_stay_as_they_are(seed):
    for shapes in (((2, 3, 2), (2, 2, 4)), ((3, 2), (2,)), ((1,), (1,))):
        module, _ = traced(operator.matmul, *map(torch.randn, shapes))
        OuterProducts()(module.graph)
        assert module.graph.find_nodes(op="call_function", target=operator.matmul), shapes


# ---- patterns


def matched(pattern: Callable[..., Any], function: Callable[..., Any]) -> dict[str, Any] | None:
    (output,) = fx.symbolic_trace(function).graph.find_nodes(op="output")
    match = Pattern(pattern).match(output.args[0])
    return None if match is None else {name: getattr(value, "name", value) for name, value in match[0].items()}


def test_a_pattern_finds_what_its_parameters_stand_for():
    def pattern(x: Tensor, y: Tensor, half: int) -> Tensor:
        return torch.cat((x[..., :half], y), dim=-1) * x

    assert matched(pattern, lambda a, b: torch.cat((a[..., :3], b), dim=-1) * a) == {"x": "a", "y": "b", "half": 3}
    for other in (
        lambda a, b: torch.cat((a[..., :3], b), dim=-1) * b,
        lambda a, b: torch.cat((a[..., :3:2], b), dim=-1) * a,
        lambda a, b: torch.cat((a[..., :3], b), dim=0) * a,
        lambda a, b: torch.stack((a[..., :3], b), dim=-1) * a,
        lambda a, b: torch.cat((a[..., :3], b, b), dim=-1) * a,
    ):
        assert matched(pattern, other) is None


def test_a_parameter_stands_for_one_thing():
    def pattern(x: Tensor, n: int) -> Tensor:
        return x[:n] + x[n:]

    assert matched(pattern, lambda a: a[:2] + a[2:]) == {"x": "a", "n": 2}
    assert matched(pattern, lambda a: a[:2] + a[3:]) is None
    assert matched(pattern, lambda a: a[:1] + a[True:]) is None, "true is not one"
