"""The cache that HuggingFace's loops carry around for a wrapped model: it owns rows, not tensors.

Shapes: B rows, Q new tokens a row, V vocabulary.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from compiled_llm.runner import Runner


class PagedLayer(CacheLayerMixin):
    """One layer as HuggingFace asks about it; its keys and values lie in the pages."""

    is_sliding = False

    def __init__(self, cache: PagedCache) -> None:
        """Answer for ``cache``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.ref(cache)  # a cycle would keep the rows' pages until the garbage collector comes by

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pages exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: keys and values enter the pages inside the compiled forward only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a PagedCache belongs to the wrapped model that made it and is filled by that model's own forward; "
            "pass a DynamicCache to other models"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of keys under a mask for ``query_length`` new tokens."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens a row has been given, masked ones included."""
        cache = self._cache()
        return 0 if cache is None else cache.seen

    def get_max_length(self) -> int:
        """Return -1: rows grow as far as pages go."""
        return -1


class PagedCache(Cache):
    """The rows of one ``generate`` call, or of one conversation; dropping it gives their pages back.

    Attributes:
        runner: the rows.
        seen: tokens each row has been given, masked ones (which are not stored) included.
    """

    def __init__(self, runner: Runner, layers: int) -> None:
        """Own ``runner`` and answer for ``layers`` attention layers."""
        super().__init__(layers=[PagedLayer(self) for _ in range(layers)])
        self.runner = runner
        self.seen = 0

    @property
    def is_compileable(self) -> bool:
        """False, or ``generate`` would compile by itself and turn the 2-D mask into one this cache cannot use."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a row has been given, masked ones included."""
        return self.seen

    def close(self) -> None:
        """Give all pages back."""
        self.runner.close()
        self.seen = 0

    def reset(self) -> None:
        """Forget all tokens and give their pages back; the cache can be used again."""
        self.close()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row.

        Args:
            tokens_to_remove: how many, as a negative number, as HuggingFace has it.

        Raises:
            ValueError: it is positive, or a row holds fewer tokens.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: tokens_to_remove={tokens_to_remove} must be a negative number of tokens")
        for row in self.runner.rows:
            row.rewind(row.length + tokens_to_remove)
        self.seen += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise _refusal("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise _refusal("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise _refusal("batch_select_indices")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        logits_to_keep: int | Tensor,
    ) -> CausalLMOutputWithPast:
        """Store new tokens and return their logits.

        Args:
            input_ids: ``[B, Q]``.
            attention_mask: ``[B, seen + Q]``; masked tokens are not stored. None for all.
            position_ids: ``[B, Q]`` or ``[1, Q]`` rotary positions; each row counts on where None.
            logits_to_keep: HuggingFace's: 0 for all, n for the last n, or indices into Q.

        Returns:
            ``[B, Q', V]`` logits; zeros where the token is masked.

        Raises:
            ValueError: the cache has another number of rows, or the model too few positions.
            OutOfPagesError: the pages for the new tokens are not free; nothing was stored.
        """
        batch, new = input_ids.shape
        runner = self.runner
        if runner.rows and len(runner.rows) != batch:
            raise ValueError(f"input_ids: {batch} rows do not fit a cache of {len(runner.rows)} rows")
        longest = max((row.length for row in runner.rows), default=0) + new
        if longest > runner.max_positions:
            raise ValueError(
                f"input_ids: {new} more tokens make {longest}, and the model has {runner.max_positions} positions"
            )
        while len(runner.rows) < batch:
            runner.add_row(0)
        mask = np.ones((batch, new), bool) if attention_mask is None else _host(attention_mask[:, -new:]) != 0
        if new == 1 and mask.all() and all(row.length for row in runner.rows):
            logits = self._decode(input_ids, position_ids)
        else:
            logits = self._extend(_host(input_ids), mask, position_ids, _kept_columns(logits_to_keep, new))
        self.seen += new
        return CausalLMOutputWithPast(logits=logits, past_key_values=self)

    def _decode(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        rows = self.runner.rows
        if position_ids is None:
            positions = [row.position for row in rows]
        else:
            positions = np.broadcast_to(_host(position_ids).reshape(-1), len(rows)).tolist()
        return self.runner.decode(input_ids[:, 0], positions)[:, None]

    def _extend(
        self, ids: NDArray[np.int64], mask: NDArray[np.bool_], position_ids: Tensor | None, columns: NDArray[np.int64]
    ) -> Tensor:
        rows = self.runner.rows
        if position_ids is None:
            positions = np.array([[row.position] for row in rows]) + np.cumsum(mask, axis=1) - 1
        else:
            positions = np.broadcast_to(_host(position_ids), ids.shape)
        active = [seat for seat in range(len(rows)) if mask[seat].any()]
        if not active:
            raise ValueError("attention_mask hides every new token of every row: there is nothing to compute")
        wanted, order = np.unique(columns, return_inverse=True)
        kept = np.zeros_like(mask)
        kept[:, wanted] = True
        kept &= mask
        logits = self.runner.extend(
            [rows[seat] for seat in active],
            [ids[seat][mask[seat]] for seat in active],
            [positions[seat][mask[seat]].astype(np.int64) for seat in active],
            np.flatnonzero(np.concatenate([kept[seat][mask[seat]] for seat in active])),
        )
        out = logits.new_zeros(len(rows), len(wanted), logits.shape[-1])
        out[torch.from_numpy(kept[:, wanted]).to(out.device)] = logits
        return out[:, torch.from_numpy(order).to(out.device)]


def _kept_columns(logits_to_keep: int | Tensor, new: int) -> NDArray[np.int64]:
    """Return the columns of the new tokens whose logits are wanted."""
    if isinstance(logits_to_keep, Tensor):
        return np.asarray(_host(logits_to_keep) % new, dtype=np.int64)
    return np.arange(max(0, new - logits_to_keep) if logits_to_keep else 0, new)


def _host(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def _refusal(method: str) -> RuntimeError:
    return RuntimeError(f"a PagedCache cannot {method}: its rows are not shared; pass a DynamicCache instead")
