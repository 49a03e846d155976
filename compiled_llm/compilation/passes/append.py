"""The pass that makes one op of norm, rotary embedding and the way into the pages, in front of prefill's attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from compiled_llm.compat.torch.tensors import example_of
from compiled_llm.compilation.passes.arguments import arguments_of, set_arguments
from compiled_llm.compilation.passes.raw_heads import (
    ALL_ROWS,
    FlatAngles,
    RawHeads,
    erase_unread,
    raw_heads,
    table_is_settled,
)
from compiled_llm.compilation.regions import PLANNED
from compiled_llm_ops.contracts import AppendPagedKv, PagedAttention, RopeAppendPagedKv, has_uneven_heads

_APPEND = torch.ops.compiled_llm.append_paged_kv.default
_ROPE_APPEND = torch.ops.compiled_llm.rope_append_paged_kv.default


class PreparedInAppend:
    """A pass that moves norm and rotary embedding into the op that writes pages, which returns the queries."""

    pattern = "rotary in prefill"

    def __init__(self) -> None:
        self.matches: int | None = None  # how many layers matched; None until a graph was searched

    def __call__(self, graph: fx.Graph) -> None:
        angles = FlatAngles(graph, ALL_ROWS)
        made = []
        for append, attention in list(_layers_of(graph)):
            written, attends = arguments_of(append, AppendPagedKv), arguments_of(attention, PagedAttention)
            query, key = raw_heads(attends.query, ALL_ROWS), raw_heads(written.key, ALL_ROWS)
            if query is not None and key is not None and query.goes_with(key):
                made.append(_make_one(graph, append, attention, query, key, angles))
        self.matches = (self.matches or 0) + len(made)
        if made and _table_is_settled(graph, made):
            for node in made:
                set_arguments(node, arguments_of(node, RopeAppendPagedKv)._replace(overlap=True))


def _layers_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield where layers write their pages, and the first attention over these that follows."""
    written: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is _APPEND:
            written[arguments_of(node, AppendPagedKv).pages] = node
        elif node.target in PLANNED:
            attends = arguments_of(node, PagedAttention)
            append = written.pop(attends.pages, None)
            if append is None or has_uneven_heads(example_of(attends.pages)):
                continue
            if _table_of(append, AppendPagedKv) == _table_of(node, PagedAttention):
                yield append, node


def _table_of(node: fx.Node, signature: type[Any]) -> tuple[Any, ...]:
    args = arguments_of(node, signature)
    return args.indptr, args.indices, args.last_page_len


def _make_one(
    graph: fx.Graph, append: fx.Node, attention: fx.Node, query: RawHeads, key: RawHeads, angles: FlatAngles
) -> fx.Node:
    """Replace what comes before an attention by one op, right in front of it, and return that."""
    cos, sin = angles.of(query.cos), angles.of(query.sin)
    written = arguments_of(append, AppendPagedKv)
    with graph.inserting_before(attention):
        states = [graph.call_method("squeeze", (raw.states, ALL_ROWS)) for raw in (query, key)]
        places = (written.token_rows, written.token_positions, written.indptr, written.indices)
        preparation = (query.norm, key.norm, query.epsilon or key.epsilon, cos, sin)
        scales = (written.key_scale, written.value_scale, written.saturated)
        arguments = (*states, written.value, written.pages, *places, *preparation, False, *scales)
        made = graph.call_function(_ROPE_APPEND, arguments)
    made.meta.update({name: value for name, value in append.meta.items() if name != "example_value"})
    set_arguments(attention, arguments_of(attention, PagedAttention)._replace(query=made))
    graph.erase_node(append)
    erase_unread(graph, (key, query))
    return made


def _table_is_settled(graph: fx.Graph, made: list[fx.Node]) -> bool:
    """Whether all that touch a page table before the last of these ops only read it."""
    tables: set[Any] = set()
    for node in made:
        args = arguments_of(node, RopeAppendPagedKv)
        tables |= {args.token_rows, args.token_positions, args.indptr, args.indices}
    return table_is_settled(
        tables, [node for node in graph.nodes if node.target in (_APPEND, *PLANNED, _ROPE_APPEND)], made[-1]
    )
