"""Rows of a tiny model in hand-made buffers, which decode steps and steps that draft advance, and drafters.

Shapes: B rows, k drafts, q = k + 1 new tokens of each row, X slots, N pages of a row, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import compiled_llm
from compiled_llm.compilation.drafts import Drafter, DraftInputs, drafted_step
from compiled_llm.compilation.inputs import DecodeInputs, StepTap
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.compilation.steps import decode_step, forward_of_rows
from compiled_llm_ops.protocol import own_decode_ops
from support.ops.sampling_cases import tables_of
from support.tiny_models import tiny_qwen3

VOCABULARY = 128
LENGTH = 96
"""Of texts, and of what pages hold of a row."""


class Parts(NamedTuple):
    """What a model's steps take besides their inputs."""

    model: Any
    forward: Any
    pages: list[Tensor]
    specs: Any
    paged: Callable[[], AbstractContextManager[None]]


def parts_of(model: Any) -> Parts:
    """Those of a wrapped model, whose pages nobody else uses."""
    runner = model.compiled.model_runner()
    state = runner.state
    return Parts(state.facts.in_programs, state.facts.forward, state.memories, state.specs, runner.graph_manager.paged)


def tiny_model(
    page_size: int,
    rows: int = 8,
    device: str = "cpu",
    overrides: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """On CUDA by kernels of our own, which take float32."""
    own = {"mode": "eager", "progress": False, "max_batch_size": rows, **options}
    if device == "cuda":
        own["backend"] = "triton"
    tokens = (rows + 2) * -(-LENGTH // page_size) * page_size
    model = tiny_qwen3(eos_token_id=None, **overrides).to(device)
    return compiled_llm.wrap(model, page_size=page_size, kv_memory=f"{tokens} tokens", **own)


class Rows:
    """Rows with their prompts in pages, and buffers and tables of their own."""

    def __init__(
        self,
        parts: Parts,
        page_size: int,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[Sampling],
        start: int,
        taps: tuple[StepTap, ...] = (),
        texts: Tensor | None = None,
    ) -> None:
        """Store the prompts but for their last tokens, which the rows feed in first; ``start`` is their position."""
        # ``texts`` ``[X, L]`` int32 are overwritten; if None, they are as long as rows may be.
        self.parts, self.prompts, device = parts, prompts, parts.model.device
        self.tables = tables_of(settings, VOCABULARY, str(device))
        entries, count, each = len(settings) + 1, len(prompts), -(-LENGTH // page_size)
        pages = torch.arange(1, count * each + 1, dtype=torch.int32).view(count, each)
        pages = torch.cat([pages.flip(1), torch.zeros(1, each, dtype=torch.int32)])  # the null page is padding's
        if texts is None:
            texts = torch.empty((entries, LENGTH), dtype=torch.int32, device=device)
        self.texts = texts.fill_(77)  # what nobody may read
        self.limits = torch.tensor([7] * count + [0], dtype=torch.int32, device=device)
        slots = torch.tensor([*reversed(range(count)), entries - 1])  # in another order, and one row of padding
        lengths = torch.tensor([len(prompts[slot]) if slot < count else 1 for slot in slots], dtype=torch.int32)
        columns = (slots, torch.full_like(slots, start), lengths, (slots * each).int(), pages.flatten())
        self.inputs = DecodeInputs(*(column.to(device) for column in columns), own_decode_ops(), taps=taps)
        for slot, prompt in enumerate(prompts):
            self.texts[slot, : len(prompt) - 1] = torch.tensor(prompt[:-1])
            self.tables.next_token[slot] = prompt[-1]
            self._store(slot, prompt[:-1], start)

    def _store(self, slot: int, tokens: Sequence[int], start: int) -> None:
        row = self.inputs.slots.tolist().index(slot)
        new, device = len(tokens), self.texts.device
        alone = self.inputs._replace(
            slots=self.inputs.slots[row : row + 1],
            positions=torch.tensor([start - new], device=device),
            lengths=torch.tensor([new], dtype=torch.int32, device=device),
            starts=self.inputs.starts[row : row + 1],
        )
        model, forward, pages, specs, paged = self.parts
        with torch.no_grad(), paged():
            forward_of_rows(model, forward, alone, torch.tensor([tokens], device=device), pages, specs)

    def step(self) -> Tensor:
        """Run a plain step: `[X]` int64, the token of each slot."""
        return self._run(decode_step, self.inputs, 1)[:, 0]

    def drafted(self, drafter: Drafter, new: int, step: Callable[..., Any] = drafted_step) -> Tensor:
        """Run a step with drafts: `[X, q]` int64, by slot."""
        self.inputs.lengths.add_(new - 1)
        drafts = DraftInputs(drafter, self.texts, self.limits, new)
        tokens = self._run(step, self.inputs._replace(drafts=drafts), new)
        self.inputs.lengths.sub_(new - 1)
        return tokens

    def _run(self, step: Callable[..., Any], inputs: DecodeInputs, new: int) -> Tensor:
        model, forward, pages, specs, paged = self.parts
        with torch.no_grad(), paged():
            outputs = step(model, forward, inputs, self.tables, pages, specs)
        tokens = torch.empty_like(outputs.tokens).view(-1, new)
        tokens[inputs.slots] = outputs.tokens.view(-1, new)
        return tokens.cpu()


# ---- drafters, but for that which looks texts up


class Known(NamedTuple):
    """A drafter that knows what rows will sample, and proposes it, or something else now and then."""

    answers: Tensor  # ``[X, T]`` int64
    prompts: Tensor  # ``[X]`` int64, how many tokens their texts began with
    # of slots, and of the numbers of tokens in an answer, ``[B, k]``: what is added to the right draft
    wrong_by: Callable[[Tensor, Tensor], Tensor]
    counted: Callable[[Tensor, Tensor, int], Tensor]  # of slots and lengths ``[B]`` and k: ``[B]`` int32

    def propose(self, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        at = (lengths.long() - self.prompts[slots])[:, None] + torch.arange(k, device=slots.device)
        right = self.answers[slots[:, None], at.clamp(0, self.answers.shape[1] - 1)]
        tokens = (right + self.wrong_by(slots[:, None], at)) % VOCABULARY
        return tokens, self.counted(slots, lengths, k).int()


def never(slots: Tensor, at: Tensor) -> Tensor:
    return torch.zeros_like(at)


def always(slots: Tensor, at: Tensor) -> Tensor:
    return torch.ones_like(at)


def sometimes(slots: Tensor, at: Tensor) -> Tensor:
    """Three in ten are wrong, by a rule of slot and place."""
    return ((slots * 7 + at * 13) % 10 < 3).long()


def all_of(slots: Tensor, lengths: Tensor, k: int) -> Tensor:
    return torch.full_like(lengths, k)


def some_of(slots: Tensor, lengths: Tensor, k: int) -> Tensor:
    """From none to all, by a rule of slot and length."""
    return (slots + lengths * 5) % (k + 1)


def at_position(setting: Sampling, seed: int, start: int) -> Sampling:
    """A setting whose answer begins at a position, with what it has said before."""
    return replace(setting, seed=seed, start=start - len(setting.output_ids))


def prompts_of(count: int, seed: int, last: int) -> list[list[int]]:
    """Prompts that repeat themselves, of several lengths, which end with a token."""
    rng = np.random.default_rng(seed)
    pieces = [[*rng.integers(3, VOCABULARY, 3 + number % 4).tolist(), last] for number in range(count)]
    return [piece * (2 + number % 2) for number, piece in enumerate(pieces)]
