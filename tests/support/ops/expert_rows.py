"""Rows that chose experts, and what these answer, pair by pair, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.contracts.experts import ExpertsLinear, FusedExperts

ACTIVATIONS: dict[str, Any] = {
    "none": lambda states: states,
    "silu": lambda states: states / (1 + (-states).exp()),
    "gelu": lambda states: states / 2 * (1 + torch.erf(states / 2**0.5)),
    "gelu_tanh": lambda states: states / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (states + 0.044715 * states**3))),
    "relu": lambda states: states.clamp(min=0),
    "relu2": lambda states: states.clamp(min=0) ** 2,
}

CHOICES = ["any", "the same", "one of them", "none at all", "some without", "twice in a row"]
"""How rows choose: at random; all the same experts; all k times the same one; no expert; and two that models do not."""


class ExpertRows:
    """Random rows with random weights of experts, and their choices."""

    def __init__(
        self,
        rows: int = 5,
        chosen: int = 2,
        experts: int = 6,
        *,
        choice: str = "any",
        size: int = 24,
        between: int = 20,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        ids: torch.dtype = torch.int64,
    ) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.rows, self.chosen, self.experts, self.size, self.between = rows, chosen, experts, size, between
        self.ids = self._choices(choice).to(ids)
        self.weights = torch.rand(rows, chosen, generator=self.generator)

    def _choices(self, choice: str) -> Tensor:
        draws = torch.rand(self.rows, self.experts, generator=self.generator)
        ids = draws.argsort(dim=1)[:, : self.chosen].contiguous()
        if choice == "the same":
            ids = ids[:1].expand(self.rows, -1).contiguous()
        elif choice in ("one of them", "twice in a row"):
            ids = ids[:1, :1].expand(self.rows, self.chosen).contiguous() if choice[0] == "o" else ids
            ids[::2] = ids[::2, :1]
        elif choice == "none at all":
            ids = torch.full_like(ids, self.experts)
        elif choice == "some without":
            ids[::2], ids[1::3, 0] = self.experts, -1
        return ids

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def weight(self, outputs: int, inputs: int, transposed: bool) -> Tensor:
        if transposed:
            return self.random(self.experts, inputs, outputs) / inputs**0.5
        return self.random(self.experts, outputs, inputs) / inputs**0.5

    def linear(self, *, of_pairs: bool = False, bias: bool = False, transposed: bool = False) -> ExpertsLinear:
        rows = self.random(self.rows * (self.chosen if of_pairs else 1), self.size)
        weight = self.weight(self.between, self.size, transposed)
        return ExpertsLinear(
            rows, self.ids, weight, self.random(self.experts, self.between) if bias else None, transposed
        )

    def fused(
        self, activation: str = "silu", gated: bool = True, transposed: bool = False, bias: bool = False
    ) -> FusedExperts:
        parts = 2 if gated else 1
        return FusedExperts(
            self.random(self.rows, self.size),
            self.ids,
            self.weights,
            self.weight(parts * self.between, self.size, transposed),
            self.weight(self.size, self.between, transposed),
            self.random(self.experts, parts * self.between) if bias else None,
            self.random(self.experts, self.size) if bias else None,
            activation,
            gated,
            transposed,
        )


def _answer(row: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    outputs = row @ weight.double() if transposed else weight.double() @ row
    return outputs if bias is None else outputs + bias.double()


def linear_expected(args: ExpertsLinear) -> Tensor:
    """``[P, O]`` in float64."""
    chosen, experts = args.topk_ids.shape[1], len(args.weight)
    outputs = args.weight.shape[2 if args.transposed else 1]
    out = torch.zeros(args.topk_ids.numel(), outputs, dtype=torch.float64)
    for pair, expert in enumerate(args.topk_ids.flatten().tolist()):
        if 0 <= expert < experts:
            row = args.rows[pair // chosen if len(args.rows) == len(args.topk_ids) else pair].double()
            bias = None if args.bias is None else args.bias[expert]
            out[pair] = _answer(row, args.weight[expert], bias, args.transposed)
    return out


def fused_expected(args: FusedExperts) -> Tensor:
    """``[T, H]`` in float64."""
    out, activate = torch.zeros(args.states.shape, dtype=torch.float64), ACTIVATIONS[args.activation]
    for row, experts in enumerate(args.topk_ids.tolist()):
        for place, expert in enumerate(experts):
            if not 0 <= expert < len(args.up):
                continue
            biases = [None if bias is None else bias[expert] for bias in (args.up_bias, args.down_bias)]
            projected = _answer(args.states[row].double(), args.up[expert], biases[0], args.transposed)
            if not args.gated:
                between = activate(projected)
            else:
                half = len(projected) // 2
                between = activate(projected[:half]) * projected[half:]
            answer = _answer(between, args.down[expert], biases[1], args.transposed)
            out[row] += float(args.topk_weights[row, place]) * answer
    return out
