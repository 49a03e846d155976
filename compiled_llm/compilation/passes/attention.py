"""The pass that moves norm and rotary embedding of queries and keys into decode attention."""

from __future__ import annotations

from typing import Any

from torch import fx

from compiled_llm.compilation.passes.arguments import arguments_of, set_arguments
from compiled_llm.compilation.passes.raw_heads import (
    EACH_ROW,
    FlatAngles,
    RawHeads,
    erase_unread,
    raw_heads,
    table_is_settled,
)
from compiled_llm_ops.attention.lse import ATTENTIONS
from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.protocol import DecodeOps


class PreparedInAttention:
    """A pass that moves norm and rotary embedding into decode attention, which reads them anyway."""

    # It also lets decode attention, of any kind, begin before the previous kernel has ended, if that is safe. It
    # runs before any other pass: the examples of its nodes are still true.

    pattern = "rotary"

    def __init__(self, ops: DecodeOps) -> None:
        """``ops`` are those of a backend that can."""
        self.matches: int | None = None  # how many layers matched; None until a graph was searched
        own = {op: arguments for op, arguments in ATTENTIONS.items() if "overlap" in arguments._fields}
        self._contracts: dict[Any, Any] = own | dict.fromkeys((ops.attend, ops.attend_lse), DecodeAttention)

    def __call__(self, graph: fx.Graph) -> None:
        attentions = [node for node in graph.nodes if node.target in self._contracts]
        angles = FlatAngles(graph, EACH_ROW)
        self.matches = self.matches or 0
        for node in attentions:
            args = self._arguments_of(node)
            if "query_norm" not in args._fields:  # what this kind keeps has been normed and rotated before
                continue
            query, key = raw_heads(args.query, EACH_ROW), raw_heads(args.key, EACH_ROW)
            if query is not None and key is not None and query.goes_with(key):
                _prepare_inside(graph, args, node, query, key, angles)
                self.matches += 1
        tables = set().union(*map(_table_of, map(self._arguments_of, attentions)))
        if attentions and table_is_settled(tables, attentions, attentions[-1]):
            for node in attentions:
                set_arguments(node, self._arguments_of(node)._replace(overlap=True))

    def _arguments_of(self, attention: fx.Node) -> Any:
        """Return the arguments of a decode op, nodes in place of tensors, by its own contract."""
        return arguments_of(attention, self._contracts[attention.target])


def _prepare_inside(
    graph: fx.Graph, args: Any, attention: fx.Node, query: RawHeads, key: RawHeads, angles: FlatAngles
) -> None:
    """Let an attention, which has ``args``, norm and rotate its queries and keys."""
    cos, sin = angles.of(query.cos), angles.of(query.sin)
    with graph.inserting_before(attention):
        packed = [graph.call_method("squeeze", (raw.states, EACH_ROW)) for raw in (query, key)]
    arguments = args._replace(
        query=packed[0],
        key=packed[1],
        query_norm=query.norm,
        key_norm=key.norm,
        epsilon=query.epsilon or key.epsilon,
        cos=cos,
        sin=sin,
    )
    set_arguments(attention, arguments)
    erase_unread(graph, (key, query))


def _table_of(args: Any) -> set[Any]:
    """Return the arguments that say where a batch's rows lie."""
    of_table = args[args._fields.index("starts") : args._fields.index("scale")]
    return {each for each in of_table if isinstance(each, fx.Node)}
