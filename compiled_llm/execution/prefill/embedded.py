"""Rows with embeddings, which the model reads in place of token ids."""

# Shapes: N tokens of a row, Q of them that a chunk computes, T packed tokens, C hidden size.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.inputs import PrefillInputs
from compiled_llm.compilation.options import prefill_options
from compiled_llm.compilation.program import PREFILL_EMBEDDED, Program, ProgramInputs
from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm.compilation.steps import asked_of, forward_of_packed, sampled_after
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.prefill.picked import picked
from compiled_llm.execution.state.staging import Staging
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import Forward


class EmbeddedInputs(NamedTuple):
    """What the step reads besides the inputs of other prefills."""

    embeddings: Tensor  # ``[T, C]`` in the model's dtype

    @property
    def program(self) -> Program:
        """Its own."""
        return PROGRAM

    @property
    def sizes(self) -> Sequence[tuple[Tensor, int]]:
        """Its tensor, whose first size is T."""
        return [(self.embeddings, 0)]

    def over(self, tensors: Sequence[Tensor]) -> EmbeddedInputs:
        """Return the same with another tensor."""
        return EmbeddedInputs(*tensors)


class EmbeddedTokens(NamedTuple):
    """The extra inputs of a row; its ids are zeros."""

    embeddings: Tensor  # ``[N, C]`` in the model's dtype
    places: NDArray[np.int64]  # ``[Q]`` ascending, where its tokens are in ``embeddings``

    @classmethod
    def none(cls, model: PreTrainedModel) -> EmbeddedTokens:
        """Return those of no tokens: the program is compiled with them."""
        width = cast(nn.Embedding, model.get_input_embeddings()).embedding_dim
        return cls(torch.zeros(0, width, dtype=model.dtype, device=model.device), np.zeros(0, dtype=np.int64))

    @property
    def program(self) -> Program:
        """That of all such rows."""
        return PROGRAM

    @property
    def captured(self) -> bool:
        """No: few calls have embeddings, and each size would keep as many."""
        return False

    def slice(self, start: int, stop: int) -> EmbeddedTokens:
        """Return those of tokens ``start`` to ``stop``."""
        return self._replace(places=self.places[start:stop])

    def empty(self) -> EmbeddedTokens:
        """Return those of no tokens."""
        return EmbeddedTokens(self.embeddings.new_empty(0, self.embeddings.shape[1]), np.zeros(0, dtype=np.int64))

    def pack(self, chunk: Sequence[Extension], staging: Staging) -> EmbeddedInputs:
        """Return what the step reads of packed rows, of which padding has none."""
        # It is a new tensor in any case: whether one was made in inference mode would be compiled in.
        return EmbeddedInputs(torch.cat(picked([self._of_row(extension) for extension in chunk], 0, staging)))

    def _of_row(self, extension: Extension) -> tuple[Tensor, NDArray[np.int64]]:
        if isinstance(own := extension.extra, EmbeddedTokens):
            return own.embeddings.detach(), own.places
        count = len(extension.ids)
        return self.embeddings.new_zeros(count, self.embeddings.shape[1]), np.arange(count)


def embedded_step(
    model: PreTrainedModel,
    forward: Forward,
    inputs: PrefillInputs,
    tables: SamplingTables,
    pages: list[Tensor],
    specs: tuple[KVCacheSpec, ...],
) -> StepOutputs:
    """Run packed tokens as ``prefill_step``, by their embeddings."""
    extra = cast(EmbeddedInputs, inputs.extra)
    read = {"inputs_embeds": extra.embeddings[None], "position_ids": inputs.positions, **asked_of(inputs)}
    out = forward_of_packed(model, forward, inputs, pages, specs, inputs.ids[0], logits_to_keep=inputs.keep, **read)
    return sampled_after(inputs, tables, out)


def _reads_embeddings(inputs: ProgramInputs) -> bool:
    return isinstance(inputs, PrefillInputs) and isinstance(inputs.extra, EmbeddedInputs)


PROGRAM = Program(PREFILL_EMBEDDED, _reads_embeddings, embedded_step, prefill_options, on_demand=True)
