"""New rows outside of pages: on a CPU a batch of them is one call of attention, and nothing is written twice.

Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm_ops import ragged_attention, ragged_attention_lse
from compiled_llm_ops.attention.latent.ragged import attend_on_cpu
from compiled_llm_ops.contracts.latent import RaggedAttention


class UnpagedRows(NamedTuple):
    """Where the packed tokens of rows begin that have no others.

    Attributes:
        qo_indptr: ``[B + 1]`` int32.
        ends: its numbers, in a forward that runs uncompiled on a CPU, where no layer asks for them; empty in others.
    """

    qo_indptr: Tensor
    ends: tuple[int, ...] = ()

    @property
    def new_tokens(self) -> int:
        """0: rows may differ in length, as those of ``PackedTokens``."""
        return 0

    def attend(
        self, states: tuple[Tensor, Tensor, Tensor], memory: Tensor, scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Leave keys and values in a layer's memory ``[2, T, K, D]``, and attend over them.

        Returns:
            ``[T, H, D]`` and, if ``wants_lse``, ``[T, H]`` float32, the log-sum-exp of the logits in base 2.
        """
        query, key, value = states
        memory[0].copy_(key)
        memory[1].copy_(value)
        if self.ends:
            arguments = RaggedAttention(query, key, value, self.qo_indptr, scale)
            return attend_on_cpu(arguments, self.ends, wants_lse)
        if wants_lse:
            return ragged_attention_lse(query, key, value, self.qo_indptr, scale)
        return ragged_attention(query, key, value, self.qo_indptr, scale), None
