"""Piecewise compilation: equal regions are compiled once, and nothing that differs is taken for the same."""

from __future__ import annotations

import functools
import gc
import operator
import random
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import compiled_llm
from compiled_llm.compat.torch.inductor import compile_with_inductor
from compiled_llm.compat.torch.tensors import storage_number
from compiled_llm.compilation import backend as inductor, programs as programs
from compiled_llm.compilation.program_list import DECODE_MANY
from compiled_llm.compilation.regions import Examples, Region, cut, join
from compiled_llm_ops import paged_attention
from support.compilation.left_uncompiled import leave_uncompiled
from support.compilation.traced import Inputs, descriptions_of, graphs_for_inductor, inputs_of, traced
from support.huggingface.families import FAMILIES, make
from support.noting import note_calls
from support.parity import FEW_PAGES, greedy, mixed_prompts, wrap_and_compare
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

PREFILL_AND_DECODE = 2


@pytest.fixture(autouse=True)
def pieces_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are cut at each attention where they are captured, which is on CUDA."""
    in_pieces = functools.partial(inductor.Inductor, layers_in_region=1)
    monkeypatch.setattr(programs, "Inductor", lambda *args, layers_in_region, **options: in_pieces(*args, **options))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that Inductor is given."""
    return graphs_for_inductor(monkeypatch)


# ---- whole models


@pytest.mark.parametrize(
    ("layers", "fuse"),
    [(3, True), *(pytest.param(*sizes, marks=pytest.mark.whole) for sizes in ((2, False), (5, True)))],
)
def test_a_model_takes_three_regions_however_many_layers_it_has(layers, fuse, compiles, seed, monkeypatch, whole):
    """Without --whole in prefills; test_regions_on_cpu.py has decode steps."""
    if not whole:
        leave_uncompiled(monkeypatch, DECODE_MANY)
    count = 3 * (PREFILL_AND_DECODE if whole else 1)
    looked_at = note_calls(monkeypatch, Examples, "_run", lambda self, *given: given)
    wrap_and_compare(tiny_qwen3(num_hidden_layers=layers, eos_token_id=None), seed, fuse_projections=fuse)
    assert len(compiles) == count
    assert len(looked_at) == count, "what a region computes is known from the first like it"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.whole) for name in ("GptOss", "Gemma3", "Qwen3Moe")]
)
def test_regions_of_other_families_fit_together(family, compiles, seed):
    wrap_and_compare(make(family, FAMILIES[family], seed), seed)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("family", ["OPT", "Phi"])
def test_compiled_regions_of_other_families_fit_together(family, seed):
    """OPT hands a part of a fused product straight to attention: it crosses the cut with that product's strides.

    Phi computes its MLP beside attention, of what is in front of the cut.
    """
    wrap_and_compare(make(family, FAMILIES[family], seed), seed, fuse_projections=True)


@pytest.mark.whole
def test_compiled_regions_fit_together_and_what_was_compiled_once_is_not_even_lowered_again(seed):
    """A warm start: traced, but everything behind Dynamo comes out of caches."""
    new_tokens, regions = 12, 3 * PREFILL_AND_DECODE
    counts = torch._dynamo.utils.counters["aot_autograd"]
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    new = 1e-6 * (1 + random.SystemRandom().random())  # a constant of the kernels, which no cache has
    config: dict[str, Any] = {"num_hidden_layers": 3, "eos_token_id": None, "rms_norm_eps": new}
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    expected = torch.stack(greedy(tiny_qwen3(**config), inputs, new_tokens, **options).logits)
    for start in ("cold", "warm"):
        torch._dynamo.reset()
        counts.clear()
        model = compiled_llm.wrap(tiny_qwen3(**config), **FEW_PAGES)
        found = torch.stack(greedy(model, inputs, new_tokens, **options).logits)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert counts["autograd_cache_bypass"] == 0
        assert counts[f"autograd_cache_{'hit' if start == 'warm' else 'miss'}"] == regions, counts


def test_what_a_region_computes_is_told_from_an_earlier_one_like_it(seed):
    def layers(to: Inputs, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, ...]:
        query = attend(attend(attend(to.query, to) + 1, to, pages=first) + 1, to) + 1
        sums = []  # pages have a symbol of their own in each layer, and so have these
        for pages in (second, third):
            query = attend(query, to) + 1
            sums.append(pages.sum((1, 2, 3, 4)))
        return attend(query, to), *(each + 1 for each in sums)

    inputs, *others = inputs_of(), *(torch.randn(pages, 2, 2, 4, 16) for pages in (11, 12, 13))
    for tensor in (inputs.pages, inputs.query, *others):
        torch._dynamo.mark_dynamic(tensor, 0)
    module, _ = traced(layers, inputs, *others)
    told, run = Examples(module), Examples(module)
    for _ in both_ways(module, told, run):
        pass
    assert len(run._known) == 7
    assert len(told._known) == 4, "in front of all, three layers, two layers with sums, and the last"


def test_a_view_that_all_layers_read_is_no_output_of_the_first_of_them(seed):
    """Cosines and sines of a decode step: that region would return a view of its input, and differ from the next."""

    def layers(to: Inputs, angles: Tensor) -> Tensor:
        angle, query = angles.cos().squeeze(0), to.query
        for _ in range(4):
            query = attend(query, to) * angle
        return query

    before, first, second, third, _ = descriptions(layers, inputs_of(), torch.randn(1, 3, 1, 16))
    assert "squeeze" in before
    assert first == second == third


def test_regions_that_read_a_view_of_an_input_make_it_themselves(seed):
    """Embeddings that the first two layers read, and what all layers read of a page table."""

    def layers(to: Inputs, embeddings: Tensor, offsets: Tensor) -> Tensor:
        hidden, starts = embeddings[None].unsqueeze(0), offsets[:-1]
        for _ in range(4):
            hidden = hidden + attend(hidden[0, 0] * 2, to) * starts.sum()
        return hidden

    def checked(region: Region) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            outputs = run(region, module)(*values)
            assert {*map(storage_number, outputs)}.isdisjoint(map(storage_number, values))
            return outputs

        return call

    inputs = inputs_of()
    embeddings, offsets = torch.randn(inputs.query.shape), torch.arange(5)
    module, given = traced(layers, inputs, embeddings, offsets)
    _, first, second, third, last = descriptions_of(module)
    assert "None" in first
    assert second == third != first
    assert all("slice" in layer for layer in (first, second, third, last))
    regions = cut(module)
    joined = join(regions, [*map(checked, regions)], module.graph)
    torch.testing.assert_close(joined(*given)[0], layers(inputs, embeddings, offsets))


def test_halves_of_a_weight_are_taken_where_they_are_read(seed):
    """Latents are expanded by halves of one weight, of which keys are read before the cut and values after it."""

    def layers(to: Inputs, weight: Tensor) -> Tensor:
        query = to.query
        for _ in range(3):
            key, value = weight.unflatten(0, (-1, 32)).split([16, 16], dim=1)
            query = attend(query @ key[0], to) @ value[0]
        return query

    module, _ = traced(layers, inputs_of(), torch.randn(64, 16))
    for region in cut(module):
        for output in region.outputs:
            assert output.target is not operator.getitem or output.args[0].target != "split"


def test_a_region_is_compiled_for_the_layout_in_which_it_gets_what_is_put_together_with_nothing(seed):
    """As GLM's rotary embedding puts heads together; Inductor would leave them in the order of their product."""

    def layers(to: Inputs) -> Tensor:
        query = to.query
        for _ in range(4):
            heads = (query * 2).transpose(0, 1)
            query = attend(torch.cat([heads[..., :16], heads[..., 16:]], dim=-1).transpose(0, 1), to)
        return query

    inputs = inputs_of()
    torch._dynamo.reset()
    compiled = torch.compile(layers, backend=inductor.Inductor({}, layers_in_region=1), fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs), layers(inputs))


def test_parts_of_one_product_share_memory_in_what_is_told_too(seed):
    def layers(to: Inputs) -> Tensor:
        query = to.query
        for _ in range(4):
            whole = torch.cat([query, query + 1], dim=1)
            first, second = whole.narrow(1, 0, 4), whole.narrow(1, 4, 4)
            query = attend(first, to) + second
        return query

    module, _ = traced(layers, inputs_of())
    told, run = Examples(module), Examples(module)
    for region in both_ways(module, told, run):
        layouts = [
            [(storage_number(value), value.shape, value.stride(), value.storage_offset()) for value in each]
            for each in ([examples._values[node] for node in region.outputs] for examples in (told, run))
        ]
        sharing = [[first[0] == second[0] for first, second in product(each, each)] for each in layouts]
        assert sharing[0] == sharing[1]
        assert [each[1:] for each in layouts[0]] == [each[1:] for each in layouts[1]]
    assert (len(told._known), len(run._known)) == (3, 5)


def test_what_lies_in_another_order_is_told_too(seed):
    def layers(to: Inputs) -> Tensor:
        query = to.query
        for _ in range(4):
            query = attend((query.transpose(0, 1) * 2).transpose(0, 1), to)
        return query

    module, _ = traced(layers, inputs_of())
    told, run = Examples(module), Examples(module)
    for _ in both_ways(module, told, run):
        pass
    assert (len(told._known), len(run._known)) == (3, 5)


# ---- one graph


def attend(query: Tensor, to: Inputs, scale: float = 0.25, pages: Tensor | None = None) -> Tensor:
    pages = to.pages if pages is None else pages
    table = to.indptr, to.indices, to.last_page_len
    return paged_attention(query, pages, to.indptr, *table, to.plan, to.workspace, scale)


def both_ways(module: fx.GraphModule, told: Examples, run: Examples) -> Iterator[Region]:
    """Go through the regions with results told from an earlier region like it, and with those of each region itself."""
    for number, region in enumerate(cut(module)):
        description = region.describe(told.of(region))
        assert region.describe(run.of(region)) == description
        told.follow(region, description)
        run.follow(region, f"{description} of its own {number}")
        yield region


def descriptions(function: Callable[..., Any], *inputs: Any) -> list[str]:
    return descriptions_of(traced(function, *inputs)[0])


def run(region: Region, module: fx.GraphModule) -> Callable[..., Any]:
    forward: Callable[..., Any] = fx.GraphModule(module, region.graph).forward
    return forward


def test_regions_run_one_after_the_other_compute_what_the_whole_does(seed):
    def function(to: Inputs, count: Tensor) -> tuple[Tensor, Tensor]:
        count.add_(1)  # an input that is written in front of a cut and read behind it
        first = attend(to.query * count, to)
        return attend(first + to.query, to) * count, first

    inputs, count = inputs_of(), torch.ones(1)
    module, given = traced(function, inputs, count)
    regions = cut(module)
    assert len(regions) == 3
    joined = join(regions, [run(region, module) for region in regions], module.graph)
    assert count == 2
    found = joined(*given)
    assert count == 3
    torch.testing.assert_close(tuple(found), function(inputs, torch.full((1,), 2.0)))


@pytest.mark.whole
def test_a_region_is_given_the_sizes_that_its_own_inputs_are_made_of():
    """The first one reads ``indptr``, of rows and one more, and nothing that has as many entries as there are rows."""

    def model(query: Tensor, pages: Tensor, *table: Tensor) -> Tensor:
        starts = query + table[0].sum()
        out = paged_attention(starts, pages, table[0], *table, scale=0.3)
        return out + (table[0].diff() + table[2]).sum()

    inputs = inputs_of(3)
    for tensor in (inputs.indptr, inputs.last_page_len):
        torch._dynamo.mark_dynamic(tensor, 0)
    module, given = traced(model, *inputs)
    regions, examples = cut(module), Examples(module)
    before = [len(region.inputs) for region in regions]
    functions = []
    for region in regions:
        examples.complete(region)
        examples.follow(region, region.describe(examples.of(region)))
        functions.append(compile_with_inductor(fx.GraphModule(module, region.graph), examples.of(region), {}))
    assert [len(region.inputs) - old for region, old in zip(regions, before, strict=True)] == [1, 0]
    torch.testing.assert_close(join(regions, functions, module.graph)(*given)[0], model(*inputs))


def test_what_no_later_piece_reads_is_freed(seed):
    def function(to: Inputs) -> Tensor:
        return attend(attend(to.query * 2, to) * 2, to) * 2

    module, given = traced(function, inputs_of())
    regions = cut(module)
    alive: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(sum(each() is not None for each in alive))
            found = function(*args)
            alive.extend(map(weakref.ref, found))
            return found

        return call

    join(regions, [watched(run(region, module)) for region in regions], module.graph)(*given)
    gc.collect()
    assert [len(region.outputs) for region in regions] == [1, 1, 1]
    assert seen == [0, 1, 1], "each reads what the one in front of it computed, and nothing older is left"


def test_a_description_leaves_out_names_and_symbols_only(seed):
    def layers(to: Inputs, others: Tensor) -> Tensor:
        first = attend(to.query, to) + 1
        return attend(attend(first, to, pages=others) + 1, to) + 1

    inputs, others = inputs_of(), torch.randn(11, 2, 2, 4, 16)
    for tensor in (inputs.pages, others):
        torch._dynamo.mark_dynamic(tensor, 0)
    _, *layers_like_each_other = descriptions(layers, inputs, others)
    assert len(layers_like_each_other) == 3
    assert len(set(layers_like_each_other)) == 1, "pages have a symbol of their own in each layer"


@pytest.mark.parametrize(
    "second",
    [
        lambda x, to: attend(x, to, 0.5) + 1,
        lambda x, to: attend(x, to) + 2,
        lambda x, to: attend(x, to) - 1,
        lambda x, to: attend(x, to).add(1),
        lambda x, to: attend(x, to, pages=to.pages[:, :, :, :2]) + 1,
        lambda x, to: attend(x.transpose(0, 1).contiguous().transpose(0, 1), to) + 1,
        lambda x, to: attend(x.double(), to, pages=to.pages.double()) + 1,
        lambda x, to: attend(x, to) + x,
    ],
    ids=["argument", "number", "operation", "method", "shape", "stride", "dtype", "input"],
)
def test_a_description_tells_apart_what_differs(second, seed):
    def layers(to: Inputs) -> Tensor:
        return attend(second(attend(to.query, to) + 1, to), to) + 1

    _, first, other, _ = descriptions(layers, inputs_of())
    assert first != other
