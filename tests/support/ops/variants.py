"""Variants of attention, each with a dense computation of its own.

Shapes: B rows, T packed tokens, L tokens of one row, H query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops import Variant, register_variant
from support.ops.op_cases import Batch

FAR = 12
"""Distances that tables of biases know."""


class Places(NamedTuple):
    """One query: numbers, and the positions `[L]` of its row's keys."""

    row: int
    token: int
    query: int
    keys: Tensor
    heads: Tensor

    @property
    def distance(self) -> Tensor:
        return self.query - self.keys


Dense = Callable[[Tensor, Places, list[Tensor]], Tensor]
"""Takes the logits `[H, L]` of one query; -inf hides a key, or 0 where there is no softmax."""


class Example(NamedTuple):
    """What is registered, what is given, and what is expected."""

    options: dict[str, Any]
    dense: Dense
    tensors: Callable[[int, int, int], list[Tensor]] = lambda rows, tokens, heads: []

    @property
    def softmax(self) -> bool:
        return self.options.get("softmax", True)


def slopes_of(heads: int) -> Tensor:
    return 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)


def alibi(logit, row, head, query_position, key_position, slopes):
    return logit + slopes[head] * (key_position - query_position)


def soft_cap(logit, row, head, query_position, key_position):
    return 2 * torch.tanh(logit / 2)


def window(row, head, query_position, key_position):
    return query_position - key_position <= 3


def relative(logit, row, head, query_position, key_position, bias):
    return logit + bias[head, torch.clamp(query_position - key_position, max=FAR - 1)]


def inkling(logit, row, head, query_position, key_position, rel_logits):
    return logit + rel_logits[head, query_position - key_position]


def sigmoid(logit, row, head, query_position, key_position, shift):
    return torch.sigmoid(logit + shift[head])


def unseen(logit, row, head, query_position, key_position, table):
    return logit * (1 + 0.1 * (head % 3)) + torch.where(query_position - key_position > 7, -2.0, table[row])


def documents(row, head, query_position, key_position, document):
    return document[row, query_position] == document[row, key_position]


def blind(row, head, query_position, key_position):
    return (key_position % 5 == 4) & ((head != 1) | (query_position > 6))


def mixed(logit, row, head, query_position, key_position, gate, on):
    far = (key_position - query_position - 3) // 4
    near = torch.minimum(abs(far) % 3, head)
    lifted = torch.exp(-abs(logit)) - torch.log(2.0 + logit * logit) ** 2
    return torch.where(on[head] & ~(far < -2), lifted / (1 + near), gate * logit + far)


def _ints(rows: int, tokens: int, heads: int) -> list[Tensor]:
    return [torch.arange(256).expand(rows, -1).div(6, rounding_mode="floor") + 99 * torch.arange(rows)[:, None]]


def _mixed(logits: Tensor, at: Places, tensors: list[Tensor]) -> Tensor:
    gate, on = tensors
    far = torch.div(at.keys - at.query - 3, 4, rounding_mode="floor")
    near = torch.minimum((far.abs() % 3)[None], at.heads[:, None])
    lifted = torch.exp(-logits.abs()) - torch.log(2 + logits**2) ** 2
    chosen = on[:, None] & (far >= -2)
    return torch.where(chosen, lifted / (1 + near), gate[at.token].float() * logits + far)


EXAMPLES: dict[str, Example] = {
    "alibi": Example(
        {"logits": alibi, "tensors": {"slopes": ("head", torch.float32)}},
        lambda logits, at, tensors: logits - tensors[0][:, None] * at.distance,
        lambda rows, tokens, heads: [slopes_of(heads)],
    ),
    "soft_cap": Example({"logits": soft_cap}, lambda logits, at, tensors: 2 * torch.tanh(logits / 2)),
    "window": Example({"visible": window}, lambda logits, at, tensors: logits.masked_fill(at.distance > 3, -math.inf)),
    "relative": Example(
        {"logits": relative, "tensors": {"bias": (("head", "position"), torch.bfloat16)}},
        lambda logits, at, tensors: logits + tensors[0].float()[:, at.distance.clamp(0, FAR - 1)],
        lambda rows, tokens, heads: [torch.randn(heads, FAR).bfloat16()],
    ),
    "inkling": Example(
        {"logits": inkling, "tensors": {"rel_logits": (("query", "head", "position"), torch.float32)}},
        lambda logits, at, tensors: (
            logits + torch.where(at.distance < FAR, tensors[0][at.token][:, at.distance.clamp(0, FAR - 1)], 0)
        ),
        lambda rows, tokens, heads: [torch.randn(tokens, heads, FAR)],
    ),
    "sigmoid": Example(
        {"logits": sigmoid, "tensors": {"shift": ("head", torch.float32)}, "softmax": False},
        lambda logits, at, tensors: 1 / (1 + torch.exp(-(logits + tensors[0][:, None]))),
        lambda rows, tokens, heads: [torch.linspace(-3, 0, heads)],
    ),
    "unseen": Example(
        {"logits": unseen, "tensors": {"table": ("row", torch.float16)}},
        lambda logits, at, tensors: (
            logits * torch.tensor([1 + 0.1 * (int(h) % 3) for h in at.heads])[:, None]
            + torch.where(at.distance > 7, -2.0, tensors[0][at.row].float())
        ),
        lambda rows, tokens, heads: [torch.randn(rows).half()],
    ),
    "documents": Example(
        {"visible": documents, "tensors": {"document": (("row", "position"), torch.int64)}},
        lambda logits, at, tensors: logits.masked_fill(at.keys // 6 != at.query // 6, -math.inf),
        _ints,
    ),
    "blind": Example(
        {"visible": blind},
        lambda logits, at, tensors: logits.masked_fill(
            (at.keys % 5 != 4) | ((at.heads[:, None] == 1) & (at.query <= 6)), -math.inf
        ),
    ),
    "mixed": Example(
        {"logits": mixed, "tensors": {"gate": ("query", torch.bfloat16), "on": ("head", torch.bool)}},
        _mixed,
        lambda rows, tokens, heads: [torch.randn(tokens).bfloat16(), torch.arange(heads) % 3 != 1],
    ),
}


def registered(name: str) -> Variant:
    return register_variant(f"example_{name}", **EXAMPLES[name].options)


def expected(batch: Batch, example: Example, tensors: list[Tensor], window_left: int = -1) -> tuple[Tensor, Tensor]:
    """`[T, H, E]` and the log-sum-exp `[T, H]` in base 2, in float32, one query after the other."""
    outputs, sums, taken = [], [], 0
    for row, (length, count) in enumerate(zip(batch.lengths, batch.queries, strict=True)):
        keys, values = (
            states[row].float().repeat_interleave(batch.group, 1).transpose(0, 1)
            for states in (batch.keys, batch.values)
        )
        for query in range(length - count, length):
            heads = torch.arange(batch.query.shape[1])
            logits = (keys @ batch.query[taken].float()[:, :, None])[..., 0] * batch.scale
            at = Places(row, taken, query, torch.arange(length), heads)
            logits = example.dense(logits, at, tensors)
            hidden = (at.keys > query) | ((window_left >= 0) & (at.distance > window_left))
            logits = logits.masked_fill(hidden, -math.inf if example.softmax else 0)
            weights = torch.softmax(logits, 1).nan_to_num(0.0) if example.softmax else logits
            outputs.append(weights[:, None] @ values)
            sums.append(torch.logsumexp(logits, 1) / math.log(2))
            taken += 1
    return torch.stack(outputs)[:, :, 0], torch.stack(sums)
