"""One op takes over norm, position and the way into the pages in front of prefill's attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation import backend as inductor, programs as programs
from compiled_llm.compilation.passes.append import PreparedInAppend
from compiled_llm.compilation.regions import PLANNED
from compiled_llm.engine.engine import Engine
from compiled_llm_ops import append_paged_kv, paged_attention, paged_attention_lse
from compiled_llm_ops.contracts import AppendPagedKv, PagedAttention, RopeAppendPagedKv
from support.compilation.passes_on_a_cpu import let_passes_run_on_a_cpu
from support.compilation.traced import traced
from support.engine.tiny_engines import PATIENCE, greedy as greedily
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.huggingface.families import FAMILIES, make
from support.ops.op_cases import UNREAD
from support.parity import FEW_PAGES, alone, assert_account_is_empty, greedy, mixed_prompts, wrap_and_compare
from support.tiny_models import WINDOWS, tiny_llama, tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

ROPE_APPEND = torch.ops.compiled_llm.rope_append_paged_kv.default
APPEND = torch.ops.compiled_llm.append_paged_kv.default


@pytest.fixture(autouse=True)
def prefill_passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on CUDA only."""
    let_passes_run_on_a_cpu(monkeypatch)


def found(graph: fx.Graph, op: Any, signature: Any) -> list[Any]:
    return [signature(*node.args, **node.kwargs) for node in graph.find_nodes(op="call_function", target=op)]


def made_in(graph: fx.Graph) -> list[RopeAppendPagedKv]:
    return found(graph, ROPE_APPEND, RopeAppendPagedKv)


# ---- whole models


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs of prefills as Inductor would be given them; they run uncompiled."""
    graphs: list[fx.Graph] = []

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        module.recompile()
        if any(node.target in PLANNED for node in module.graph.nodes):
            graphs.append(module.graph)
        return module.forward

    monkeypatch.setattr(inductor, "compile_with_inductor", noted)
    return graphs


def spoil(model: PreTrainedModel) -> None:
    """What lies in pages that nobody has shows if it is read: a finite number, since zero times NaN is not zero."""
    for pages in model.compiled.model_runner().state.pages:
        pages[1:].fill_(1e4)


class Found(NamedTuple):
    """Of two layers, those in which the op turns queries and keys, and in which it norms them first."""

    turned: int
    normed: int


FAMILIES_FOUND = {
    "Qwen3": Found(2, 2),
    "Llama": Found(2, 0),
    "Gemma2": Found(2, 0),  # capped logits, and a window in every other layer
    "Glm4": Found(0, 0),  # it turns neighbours, a part of each head
    "GptOss": Found(0, 0),
    "Qwen3Moe": Found(2, 2),
    "Qwen2": Found(2, 0),
    "Phi3": Found(0, 0),
    "Cohere2": Found(0, 0),
}
MORE = ("Llama", "Gemma2", "Glm4", "GptOss", "Qwen3Moe", "Qwen2", "Phi3", "Cohere2")
"""What the pass makes of their layers, tests of one graph say in each run, below."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.whole] * (family in MORE)) for family in FAMILIES_FOUND]
)
def test_what_the_op_does_in_a_prefill(family, prefills, seed):
    own = {"Qwen3": tiny_qwen3, "Llama": tiny_llama}
    model = own[family](eos_token_id=None) if family in own else make(family, FAMILIES[family], seed)
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    expected = greedy(model, inputs, 12)
    compiled_llm.wrap(model, fuse_projections=True, **FEW_PAGES)
    for _ in range(2):
        torch.testing.assert_close(greedy(model, inputs, 12), expected)
        assert_account_is_empty(model)
        spoil(model)
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert stats.patterns["rotary in prefill"] == FAMILIES_FOUND[family].turned
    (graph,) = prefills
    made = made_in(graph)
    assert Found(len(made), sum(args.query_norm is not None for args in made)) == FAMILIES_FOUND[family]
    assert all(args.overlap and (args.query_norm is None) is (args.key_norm is None) for args in made)
    assert len(found(graph, APPEND, AppendPagedKv)) + len(made) == 2
    if made:
        assert not graph.find_nodes(op="call_function", target=torch.neg)
        assert len({(args.cos, args.sin) for args in made}) == 1, "flat once for all layers"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("layers", "mixed"),
    [
        pytest.param({}, False, id="full-apart", marks=pytest.mark.whole),
        pytest.param(WINDOWS, True, id="sliding-mixed"),
        pytest.param({}, True, id="full-mixed", marks=pytest.mark.whole),
        pytest.param(WINDOWS, False, id="sliding-apart", marks=pytest.mark.whole),
    ],
)
def test_texts_that_begin_alike_share_pages_that_the_op_wrote(layers, mixed, prefills, seed):
    plain, model = (tiny_qwen3(eos_token_id=None, **layers) for _ in range(2))
    compiled_llm.wrap(model, **FEW_PAGES)
    stem = mixed_prompts([21], 128, seed)["input_ids"][0].tolist()
    prompts = [stem, [*stem, 7, 9], [*stem[:9], 11], stem[:5], [*stem, *stem]]
    counts = [9, 15, 21, 12, 17]
    expected = [alone(plain, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    with Engine(model, max_num_seqs=2, mixed=mixed) as engine:
        spoil(model)
        for _ in range(2):
            handles = [engine.submit(prompt, greedily(count)) for prompt, count in zip(prompts, counts, strict=True)]
            assert [handle.result(PATIENCE).token_ids for handle in handles] == expected
        stats = engine.stats()
        assert stats.cached_tokens > 40
        assert (stats.mixed_steps > 0) == mixed
    assert prefills
    assert all(map(made_in, prefills))


@pytest.mark.whole
def test_captured_prefills_pad_with_tokens_that_no_row_reads(prefills, seed, monkeypatch):
    let_a_cpu_capture(monkeypatch)
    plain, model = (tiny_qwen3(eos_token_id=None) for _ in range(2))
    compiled_llm.wrap(model, mode="cuda-graphs", **FEW_PAGES)
    for lengths in [5], [9, 4, 17], [3, 3, 3, 20, 8], [6]:
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 12), greedy(plain, inputs, 12))
        spoil(model)
    rows = [row for row in model.compiled.stats().cuda_graph_table if row["phase"] == "prefill"]
    assert sum(int(str(row["replays"])) for row in rows) > 0
    assert_account_is_empty(model)
    assert prefills
    assert all(map(made_in, prefills))


@pytest.mark.whole
def test_prefills_from_embeddings_have_the_op_too(prefills, seed):
    plain, model = tiny_qwen3(eos_token_id=None), tiny_qwen3(eos_token_id=None)
    compiled_llm.wrap(model, **FEW_PAGES)
    inputs = mixed_prompts([4, 9], 128, seed)
    given = {"inputs_embeds": plain.get_input_embeddings()(inputs["input_ids"]).detach(), **inputs}
    del given["input_ids"]
    torch.testing.assert_close(greedy(model, given, 8), greedy(plain, given, 8))
    assert prefills
    assert all(map(made_in, prefills))


@pytest.mark.whole
@pytest.mark.parametrize("layers", [3, *(pytest.param(layers, marks=pytest.mark.whole) for layers in (2, 5))])
def test_a_region_ends_with_the_op_and_equal_ones_are_compiled_once(layers, monkeypatch, seed):
    in_pieces = functools.partial(inductor.Inductor, layers_in_region=1)
    monkeypatch.setattr(programs, "Inductor", lambda *args, layers_in_region, **options: in_pieces(*args, **options))
    graphs: list[fx.Graph] = []

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    monkeypatch.setattr(inductor, "compile_with_inductor", noted)
    wrap_and_compare(tiny_qwen3(num_hidden_layers=layers, eos_token_id=None), seed, fuse_projections=True)
    prefill = [bool(made_in(graph)) for graph in graphs]
    assert prefill == [True, True, *[False] * (len(graphs) - 2)], "the first layer, and all but the last alike"
    assert graphs[2].find_nodes(op="call_function", target=PLANNED[0]), "the last"
    assert not graphs[3].find_nodes(op="call_function", target=PLANNED[0]), "decode"
    for graph in graphs[:2]:
        (made,) = graph.find_nodes(op="call_function", target=ROPE_APPEND)
        assert {user.op for user in made.users} == {"output"}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("tiny", [tiny_qwen3, tiny_llama])
@pytest.mark.parametrize("layers_in_region", [0, 1], ids=["whole", "in pieces"])
def test_compiled_prefills_and_steps_choose_the_same_tokens(tiny, layers_in_region, seed, monkeypatch):
    """What Inductor makes of programs is tested in each run with artifacts, in regions, and of latents."""

    def cut(*args, **options):
        return inductor.Inductor(*args, **options | {"layers_in_region": layers_in_region})

    monkeypatch.setattr(programs, "Inductor", cut)
    layers = 3 if layers_in_region else 2  # of pieces, one has neither the first nor the last layer
    wrap_and_compare(tiny(num_hidden_layers=layers, eos_token_id=None), seed, fuse_projections=True)


# ---- one graph


class Inputs(NamedTuple):
    """Two rows, of 3 and 2 new tokens, of a layer with 4 query heads and 2 kv heads of size 16."""

    states: Tensor
    pages: Tensor
    rows: Tensor
    positions: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    cos: Tensor
    sin: Tensor
    norm: Tensor


def inputs_of() -> Inputs:
    table = ([0, 0, 0, 1, 1], [3, 4, 5, 0, 1], [0, 3, 5], [0, 2, 3], [2, 1, 4], [2, 2])
    angles = torch.rand(1, 5, 8).repeat(1, 1, 2)
    columns = [torch.tensor(column, dtype=torch.int32) for column in table]
    pages = torch.randn(6, 2, 2, 4, 16)
    return Inputs(torch.randn(1, 5, 8, 16), pages, *columns, angles.cos(), angles.sin(), torch.rand(16))


def turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    mates = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return states * cos.unsqueeze(1) + mates * sin.unsqueeze(1)


def turned_in_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    mates = torch.stack((-states[..., 1::2], states[..., ::2]), dim=-1).flatten(-2)
    return states * cos.unsqueeze(1) + mates * sin.unsqueeze(1)


def normed(states: Tensor, weight: Tensor, epsilon: float = 0.01) -> Tensor:
    numbers = states.to(torch.float32)
    variance = numbers.pow(2).mean(-1, keepdim=True)
    return weight * (numbers * torch.rsqrt(variance + epsilon)).to(states.dtype)


def attend(to: Inputs, query: Tensor, key: Tensor, *, lse: bool = False, window: int = -1) -> Tensor:
    """`[5, 4, 16]` from `[1, heads, 5, 16]`."""
    query, key, value = (
        heads.transpose(1, 2).squeeze(0) for heads in (query, key, to.states[:, :, 6:].transpose(1, 2))
    )
    table = (to.indptr, to.indices, to.last_page_len)
    append_paged_kv(key, value, to.pages, to.rows, to.positions, *table)
    given = (query, to.pages, to.qo_indptr, *table, *UNREAD, 0.25, window)
    return paged_attention_lse(*given)[0] if lse else paged_attention(*given)


Layer = Callable[[Inputs], Tensor]


def layer_of(
    turn: Callable[..., Tensor] = turned,
    query_norm: float | None = None,
    key_norm: float | None = None,
    key_angles: Callable[[Tensor], Tensor] = lambda cos: cos,
    **options: Any,
) -> Layer:
    """One that turns queries and keys, once they are normed with these epsilons."""

    def layer(to: Inputs) -> Tensor:
        query, key = to.states[:, :, :4], to.states[:, :, 4:6]
        query = query if query_norm is None else normed(query, to.norm, query_norm)
        key = key if key_norm is None else normed(key, to.norm, key_norm)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        return attend(to, turn(query, to.cos, to.sin), turn(key, key_angles(to.cos), to.sin), **options)

    return layer


def with_keys_read_twice(to: Inputs) -> Tensor:
    query, key = (normed(heads, to.norm).transpose(1, 2) for heads in (to.states[:, :, :4], to.states[:, :, 4:6]))
    key = turned(key, to.cos, to.sin)
    return attend(to, turned(query, to.cos, to.sin), key) + key.sum()


def two_over_one_memory(to: Inputs) -> Tensor:
    """The second attends over what the first has written, and writes nothing."""
    first = layer_of()(to)
    query = turned((to.states[:, :, :4] + 1).transpose(1, 2), to.cos, to.sin).transpose(1, 2).squeeze(0)
    table = (to.indptr, to.indices, to.last_page_len)
    return first + paged_attention(query, to.pages, to.qo_indptr, *table, *UNREAD, 0.25)


MADE: dict[str, tuple[Layer, tuple[bool, bool]]] = {
    "Llama": (layer_of(), (False, False)),
    "Qwen3": (layer_of(query_norm=0.01, key_norm=0.01), (True, True)),
    "normed queries": (layer_of(query_norm=0.01), (True, False)),
    "normed keys": (layer_of(key_norm=0.01), (False, True)),
    "sinks": (layer_of(query_norm=0.01, key_norm=0.01, lse=True), (True, True)),
    "a window": (layer_of(window=2), (False, False)),
    "keys that are read twice": (with_keys_read_twice, (True, True)),
    "two over one memory": (two_over_one_memory, (False, False)),
}
LEFT: dict[str, Layer] = {
    "turned in pairs": layer_of(turned_in_pairs),
    "not turned": layer_of(lambda states, cos, sin: states),
    "turned differently": layer_of(key_angles=lambda cos: cos * 2),
    "two epsilons": layer_of(query_norm=0.01, key_norm=0.5),
}


def after(layer: Layer, to: Inputs) -> tuple[fx.Graph, PreparedInAppend]:
    """Return a layer's graph after the pass, which changes neither its output nor what it writes."""
    before, expected_pages = copy.deepcopy(to), to.pages.clone()
    module, given = traced(layer, to)
    to.pages.copy_(before.pages)
    expected = layer(before._replace(pages=expected_pages))
    searched = PreparedInAppend()
    searched(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*given)[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(to.pages, expected_pages, rtol=0, atol=0)
    assert not torch.equal(expected_pages, before.pages)
    return module.graph, searched


@pytest.mark.parametrize("name", MADE)
def test_norm_position_and_pages_become_one_op_that_attention_reads(name, seed):
    layer, norms = MADE[name]
    graph, searched = after(layer, inputs_of())
    assert searched.matches == 1
    (made,) = made_in(graph)
    assert (made.query_norm is not None, made.key_norm is not None) == norms
    assert made.epsilon == (0.01 if any(norms) else 0.0)
    assert made.overlap
    (node,) = graph.find_nodes(op="call_function", target=ROPE_APPEND)
    first, *_ = [user for user in graph.nodes if user.target in PLANNED]
    assert PagedAttention(*first.args).query is node
    assert node < first
    assert not found(graph, APPEND, AppendPagedKv)
    left = layer in (with_keys_read_twice, two_over_one_memory)
    assert bool(graph.find_nodes(op="call_function", target=torch.cat)) == left


@pytest.mark.parametrize("name", LEFT)
def test_what_is_turned_or_normed_otherwise_stays_as_it_is(name, seed):
    graph, searched = after(LEFT[name], inputs_of())
    assert searched.matches == 0
    assert not made_in(graph)
    assert len(found(graph, APPEND, AppendPagedKv)) == 1


Table = Callable[[Inputs], tuple[Tensor, ...]]


def own_table(to: Inputs) -> tuple[Tensor, ...]:
    return to.indptr, to.indices, to.last_page_len


def another_table(to: Inputs) -> tuple[Tensor, ...]:
    return to.indptr, to.indices + 0, to.last_page_len


def attend_by(*tables: Table, value_size: int = 16) -> Layer:
    """One that attends by these tables, one after the other, over values of this size."""

    def layer(to: Inputs) -> Tensor:
        query, key, value = (heads.transpose(1, 2) for heads in to.states.split([4, 2, 2], 2))
        query, key = turned(query, to.cos, to.sin), turned(key, to.cos, to.sin)
        query, key, value = (heads.transpose(1, 2).squeeze(0) for heads in (query, key, value))
        append_paged_kv(key, value[..., :value_size], to.pages, to.rows, to.positions, *own_table(to))
        outs = [paged_attention(query, to.pages, to.qo_indptr, *table(to), *UNREAD, 0.25) for table in tables]
        return torch.stack(outs).sum(0)

    return layer


@pytest.mark.parametrize(
    ("tables", "matches"),
    [([own_table], 1), ([own_table, another_table], 1), ([another_table], 0), ([another_table, own_table], 0)],
)
def test_the_attention_that_reads_first_reads_by_the_same_table(tables, matches, seed):
    """Else it would read before it is written."""
    graph, searched = after(attend_by(*tables), inputs_of())
    assert (searched.matches, len(made_in(graph))) == (matches, matches)


def test_values_of_another_size_stay_as_they_are(seed):
    layer = attend_by(own_table, value_size=6)
    graph, searched = after(layer, inputs_of()._replace(pages=torch.randn(6, 2, 4, 16 + 6)))
    assert (searched.matches, made_in(graph)) == (0, [])


@pytest.mark.parametrize("column", ["positions", "indptr", "indices", "rows"])
@pytest.mark.parametrize("writes_first", [True, False])
def test_a_table_is_read_early_unless_it_was_written_before(column, writes_first, seed):
    def layer(to: Inputs) -> Tensor:
        if writes_first:
            getattr(to, column).add_(0)
        out = layer_of()(to)
        getattr(to, column).add_(0)
        return out

    graph, _ = after(layer, inputs_of())
    (made,) = made_in(graph)
    assert made.overlap != writes_first
