"""The attention function that HuggingFace's layers reach while our graphs are traced.

Every attention layer calls the function registered under its config's implementation name, with its own keys and
values of the new tokens and with whatever keyword arguments ``forward`` was given. Ours writes them into the layer's
pages and attends over the row's pages.

Shapes: T packed tokens (decode: q of each row), H query heads, K kv heads, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from compiled_llm.model.layer_probe import LayerProbe, UnpagedCallError
from compiled_llm.model.layers.indexers import IndexedRows
from compiled_llm.model.layers.latents import Latents
from compiled_llm.model.layers.recurrent import StateRows
from compiled_llm.model.layers.unpaged import UnpagedRows
from compiled_llm.model.layers.variants import AppliedVariant, LayerVariant
from compiled_llm_ops import (
    append_latent,
    append_paged_kv,
    decode_attention,
    decode_attention_lse,
    latent_attention,
    latent_attention_lse,
    latent_decode,
    latent_decode_lse,
    paged_attention,
    paged_attention_lse,
    planned_latent_attention,
    planned_latent_attention_lse,
    ragged_attention,
    ragged_attention_lse,
)
from compiled_llm_ops.contracts import DecodeAttention, PageTable
from compiled_llm_ops.protocol import DecodeOps

NAME = "compiled_llm"
BATCH_ARGUMENT = "paged_batch"

States = tuple[Tensor, Tensor, Tensor]
"""The packed queries, keys and values of new tokens."""

Options = tuple[float, int, float]
"""Scale, window and cap."""


class PageScales(NamedTuple):
    """Scales of a layer whose pages are of fp8; None in all places for pages of the model's dtype.

    Attributes:
        key: ``[K]`` float32, by kv head.
        value: likewise.
        saturated: ``[1]`` int64, how many numbers were clamped.
    """

    key: Tensor | None = None
    value: Tensor | None = None
    saturated: Tensor | None = None


UNSCALED = PageScales()


class AttentionPlans(NamedTuple):
    """A backend's division of attention among thread blocks, decided on the host before the step.

    Attributes:
        tensors: one ``[bytes]`` uint8 for each attention group: layers of one geometry share a plan.
        workspace: ``[bytes]`` uint8, scratch memory that all layers use in turn.
        groups: each layer's attention group.
    """

    tensors: tuple[Tensor, ...]
    workspace: Tensor
    groups: tuple[int, ...]
    backend: str


class PackedTokens(NamedTuple):
    """Positions of packed tokens, for rows with any number of new ones, and the plan by which they attend.

    Attributes:
        token_rows: ``[T]`` int32, the row of each token.
        token_positions: ``[T]`` int32, each token's index in its row's cache.
        qo_indptr: ``[B + 1]`` int32, where each row's tokens begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, the new ones included.
        new_tokens: q if each row has q tokens, so that the layers have ``[B, H, q, D]`` for ``[1, H, T, D]``; else 0.
        alone: whether rows have no other tokens than these, so that layers with latents attend to expanded keys and
            values; without latents, it makes no difference.
        visible: ``[T, K, n]`` int32, which pages of its row each token reads, -1 for none; None for all.
        variant: by which a layer attends; None in others.
    """

    token_rows: Tensor
    token_positions: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    plans: AttentionPlans
    new_tokens: int = 0
    alone: bool = False
    visible: Tensor | None = None
    variant: AppliedVariant | None = None

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def attend(
        self,
        layer: int,
        states: States,
        pages: Tensor,
        options: Options,
        wants_lse: bool,
        scales: PageScales = UNSCALED,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new keys and values into a layer's pages, and attend over them; as ``AttentionSpec.attend``."""
        if self.visible is not None:
            return self._attend_to_visible(states, pages, options, wants_lse, scales, self.visible)
        if self.variant is not None:
            return self._attend_by_variant(self.variant, layer, states, pages, options, wants_lse, scales)
        arguments = (*self._appended(layer, states, pages, scales), *options, scales.key, scales.value)
        if wants_lse:
            return paged_attention_lse(*arguments)
        return paged_attention(*arguments), None

    def _attend_to_visible(
        self,
        states: States,
        pages: Tensor,
        options: Options,
        wants_lse: bool,
        scales: PageScales,
        visible: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new keys and values, and let each token attend as the newest one of a row, to be written again."""
        self._append(states, pages, scales)
        starts, lengths = self.indptr[self.token_rows], self.token_positions + 1
        arguments = DecodeAttention(
            *states,
            pages,
            starts,
            lengths,
            self.indices,
            *options,
            key_scale=scales.key,
            value_scale=scales.value,
            visible=visible,
        )
        if wants_lse:
            return decode_attention_lse(*arguments)
        return decode_attention(*arguments), None

    def _attend_by_variant(
        self,
        variant: AppliedVariant,
        layer: int,
        states: States,
        pages: Tensor,
        options: Options,
        wants_lse: bool,
        scales: PageScales,
    ) -> tuple[Tensor, Tensor | None]:
        self._append(states, pages, scales)
        table, group = PageTable(self.qo_indptr, *self.table), self.plans.groups[layer]
        planned = None if group < 0 else (self.plans.tensors[group], self.plans.workspace)
        return variant.over_packed(states[0], pages, table, options, scales[:2], wants_lse, planned)

    def attend_to_latents(
        self, layer: int, states: States, pages: Tensor, scale: float, wants_lse: bool, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new latents into a layer's pages, and attend over them with absorbed queries, by its plan if any.

        ``states`` are queries ``[T, H, R + E]``, latents ``[T, 1, R]`` and their rotated parts ``[T, 1, E]``;
        ``chosen`` ``[T, n]`` the positions that each query reads, None for all.
        """
        plans, group = self.plans, self.plans.groups[layer]
        if group < 0:
            return _attend_to_latents(states, pages, self._places, scale, wants_lse, chosen)
        assert chosen is None, "layers with indexers have no plan"
        query, latent, rope = states
        rank = latent.shape[2]
        append_latent(latent[:, 0], rope[:, 0], pages, *self._places)
        table = (self.qo_indptr, *self.table, plans.tensors[group], plans.workspace)
        arguments = (query[..., :rank], query[..., rank:], pages, *table, scale)
        if wants_lse:
            return planned_latent_attention_lse(*arguments)
        return planned_latent_attention(*arguments), None

    def indexed(self, page_size: int, row_pages: int, padding: int, block_size: int = 1) -> IndexedRows:
        """Return where index keys lie, in pages of so many tokens; rows may have ``row_pages``."""
        if not self.new_tokens:
            return IndexedRows(*self._places, page_size, 0, padding, block_size)
        tokens = (self.token_rows, self.token_positions)
        return IndexedRows(*tokens, self.indptr[:-1], self.indices, page_size, row_pages, padding, block_size)

    def attend_to_expanded(
        self, states: States, latents: tuple[Tensor, Tensor], pages: Tensor, scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new latents into a layer's pages, and attend over keys and values that were expanded of them.

        ``states`` are queries, keys and values of the new tokens, which are all that their rows have; ``latents`` are
        ``[T, 1, R]`` and their rotated parts ``[T, 1, E]``.
        """
        latent, rope = latents
        append_latent(latent[:, 0], rope[:, 0], pages, *self._places)
        if wants_lse:
            return ragged_attention_lse(*states, self.qo_indptr, scale)
        return ragged_attention(*states, self.qo_indptr, scale), None

    @property
    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.token_rows, self.token_positions, self.indptr, self.indices

    def _appended(
        self, layer: int, states: States, pages: Tensor, scales: PageScales
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Write the new keys and values, and return all tensors that ``paged_attention`` takes."""
        self._append(states, pages, scales)
        plans = self.plans
        return states[0], pages, self.qo_indptr, *self.table, plans.tensors[plans.groups[layer]], plans.workspace

    def _append(self, states: States, pages: Tensor, scales: PageScales) -> None:
        _, key, value = states
        places = (self.token_rows, self.token_positions, *self.table)
        append_paged_kv(key, value, pages, *places, self.plans.backend, *scales)


class JointAttention(Protocol):
    """A way in which all rows of a decode step attend, in place of the backend's ops."""

    def attend(self, arguments: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]: ...


class NewestTokens(NamedTuple):
    """Page table of rows with as many new tokens each, and the ops by which they attend without a plan.

    Attributes:
        starts: ``[B]`` int32, where each row's pages begin in ``indices``.
        lengths: ``[B]`` int32, tokens of each row, the new ones included.
        indices: ``[N]`` int32, page numbers.
        ops: the backend's.
        new_tokens: q.
        visible: ``[B, K, n]`` int32, which of its pages each row reads, -1 for none; None for all. Only with q = 1.
        variant: by which a layer attends, each row to all of its own; None in others.
        shared: by which all layers attend in place of ``ops``; None if by those.
    """

    starts: Tensor
    lengths: Tensor
    indices: Tensor
    ops: DecodeOps
    new_tokens: int = 1
    visible: Tensor | None = None
    variant: AppliedVariant | None = None
    shared: JointAttention | None = None

    def attend(
        self,
        layer: int,
        states: States,
        pages: Tensor,
        options: Options,
        wants_lse: bool,
        scales: PageScales = UNSCALED,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new keys and values into a layer's pages, and attend over them; as ``AttentionSpec.attend``."""
        table = (pages, self.starts, self.lengths, self.indices)
        if self.variant is not None:
            return self.variant.of_newest(states, table, options, scales, wants_lse)
        arguments = DecodeAttention(
            *states,
            *table,
            *options,
            key_scale=scales.key,
            value_scale=scales.value,
            saturated=scales.saturated,
            visible=self.visible,
        )
        if self.shared is not None:
            return self.shared.attend(arguments, wants_lse)
        if wants_lse:
            out, lse = self.ops.attend_lse(*arguments)
            return out, lse
        return self.ops.attend(*arguments), None

    def indexed(self, page_size: int, row_pages: int, padding: int, block_size: int = 1) -> IndexedRows:
        """As ``PackedTokens.indexed``."""
        return IndexedRows(*self._places, page_size, row_pages, padding, block_size)

    @property
    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, new, device = len(self.starts), self.new_tokens, self.starts.device
        token_rows = torch.arange(rows, dtype=torch.int32, device=device)[:, None].expand(-1, new).flatten()
        positions = self.lengths[:, None] - new + torch.arange(new, dtype=torch.int32, device=device)
        return token_rows, positions.flatten(), self.starts, self.indices

    def attend_to_latents(
        self, layer: int, states: States, pages: Tensor, scale: float, wants_lse: bool, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As ``PackedTokens.attend_to_latents``."""
        table = (self.starts, self.lengths, self.indices)
        if self.new_tokens > 1:
            return _attend_to_latents(states, pages, self._places, scale, wants_lse, chosen)
        query, latent, rope = states
        rank = latent.shape[2]
        arguments = (query[..., :rank], query[..., rank:], latent[:, 0], rope[:, 0], pages, *table, scale)
        if wants_lse:
            return latent_decode_lse(*arguments, chosen=chosen)
        return latent_decode(*arguments, chosen=chosen), None


def _attend_to_latents(
    states: States,
    pages: Tensor,
    places: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    wants_lse: bool,
    chosen: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    query, latent, rope = states
    rank = latent.shape[2]
    append_latent(latent[:, 0], rope[:, 0], pages, *places)
    arguments = (query[..., :rank], query[..., rank:], pages, *places, scale, chosen)
    if wants_lse:
        return latent_attention_lse(*arguments)
    return latent_attention(*arguments), None


class LayerSpec(Protocol):
    """The part of a KV spec that programs read, whether or not the layer attends."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The layer's own tensors that it reads or writes besides its memory."""
        ...


class AttentionSpec(LayerSpec, Protocol):
    """That of a layer that attends: how it writes new tokens to its memory, and attends over it."""

    def attend(
        self,
        rows: PackedTokens | NewestTokens,
        layer: int,
        states: States,
        memory: Tensor,
        options: Options,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the new keys and values, and attend over all tokens of their rows.

        Returns:
            ``[T, H, D]`` and, if ``wants_lse``, ``[T, H]`` float32, the log-sum-exp of the logits in base 2.
        """
        ...


class PagedBatch(NamedTuple):
    """The batch as the layers need it: where its tokens go, and where its rows lie.

    Attributes:
        pages: the memory of each layer.
        specs: of each layer.
        rows: where new tokens go, and the table of their rows' pages.
        windows: tokens visible to the left of a query in each layer, -1 for all, in place of the layers' own windows;
            empty to use those.
        latents: what layers of multi-head latent attention hand over; None if layers keep keys and values.
        indexed: where index keys lie by which blocks are chosen; None if no layer chooses blocks.
        variants: of each layer; empty if none has one.
        states: where the states of rows lie; None if no layer is recurrent. Their memories follow those of ``specs``.
    """

    pages: list[Tensor]
    specs: tuple[LayerSpec, ...]
    rows: PackedTokens | NewestTokens | UnpagedRows
    windows: tuple[int, ...] = ()
    latents: Latents | None = None
    indexed: IndexedRows | None = None
    variants: tuple[LayerVariant | None, ...] = ()
    states: StateRows | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    paged_batch: PagedBatch | LayerProbe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over pages; HuggingFace's attention-function protocol.

    Args:
        module: the attention layer; its ``layer_idx`` picks the pages.
        query: ``[1, H, T, D]`` packed, or ``[B, H, q, D]`` in decode.
        key: ``[1, K, T, D]`` or ``[B, K, q, D]``, the new tokens' only.
        value: like ``key``; its D may be another.
        attention_mask: None, or what an indexer has read: masked tokens are never stored.
        scaling: factor on the logits; ``D ** -0.5`` if None.
        sliding_window: tokens a query sees, itself included; all if None.
        softcap: cap on the logits; no cap if None.
        s_aux: ``[H]`` attention sinks, one more logit a head that takes weight and has no value.
        indices: ``[1, T, n]`` or ``[B, q, n]`` int32, what an indexer has chosen for each query; None for all tokens.
        block_indices: ``[1, K, T, n]`` or ``[B, K, q, n]`` integers, the blocks of its row that an indexer has chosen
            for each query and kv head, -1 for none; None for all tokens.
        paged_batch: handed through ``forward`` by our own calls.
        kwargs: further arguments of the model, tensors of variants among them; checked once, by the probe.

    Returns:
        ``[1, T, H, D]`` or ``[B, q, H, D]``, D that of ``value``, and None in place of attention weights.

    Raises:
        UnpagedCallError: the caller is not one of our own compiled calls.
    """
    if paged_batch is None:
        raise UnpagedCallError(
            "paged attention was called without pages: inside a compiled call, call the wrapped model itself, not its "
            "inner modules or another model of the same config"
        )
    if isinstance(paged_batch, LayerProbe):
        chosen_by_indexers = {"indices": indices, "block_indices": block_indices}
        others = {**kwargs, **{name: given for name, given in chosen_by_indexers.items() if given is not None}}
        seen = (attention_mask, sliding_window, softcap, others, s_aux is not None)
        return paged_batch.visit(module, query, key, value, *seen)
    layer = cast(int, module.layer_idx)
    spec, memory = cast(AttentionSpec, paged_batch.specs[layer]), paged_batch.pages[layer]
    rows = paged_batch.rows
    states = (_pack(query, rows.new_tokens), _pack(key, rows.new_tokens), _pack(value, rows.new_tokens))
    options = (
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        _window_left(paged_batch, layer, sliding_window),
        softcap or 0.0,
    )
    latents, absorbs = paged_batch.latents, False
    if isinstance(rows, UnpagedRows):
        out, lse = rows.attend(states, memory, options[0], s_aux is not None)
    elif latents is None:
        if paged_batch.variants and (variant := paged_batch.variants[layer]) is not None:
            rows = rows._replace(variant=variant.applied(module, kwargs))
        if block_indices is not None and paged_batch.indexed is not None:
            rows = rows._replace(visible=paged_batch.indexed.visible(block_indices))
        out, lse = spec.attend(rows, layer, states, memory, options, s_aux is not None)
    else:
        latent, rope = (_pack(part, rows.new_tokens) for part in latents.taken(layer))
        if isinstance(rows, PackedTokens) and rows.alone:
            out, lse = rows.attend_to_expanded(states, (latent, rope), memory, options[0], s_aux is not None)
        elif (chosen := latents.chosen(indices)) is not None:
            absorbs, states = True, (latents.absorbed(module, layer, states[0]), latent, rope)
            out, lse = rows.attend_to_latents(layer, states, memory, options[0], s_aux is not None, chosen)
        else:
            absorbs, states = True, (latents.absorbed(module, layer, states[0]), latent, rope)
            out, lse = spec.attend(rows, layer, states, memory, options, s_aux is not None)
    if s_aux is not None and lse is not None:
        out = out * torch.sigmoid(lse * math.log(2) - s_aux.float())[..., None].to(out.dtype)
    if latents is not None and absorbs:
        out = latents.expanded(module, layer, out)
    return out.view(query.shape[0], query.shape[2], query.shape[1], out.shape[2]), None


def _window_left(batch: PagedBatch, layer: int, sliding_window: int | None) -> int:
    if batch.windows:
        return batch.windows[layer]
    return -1 if sliding_window is None else sliding_window - 1


def _pack(states: Tensor, new_tokens: int) -> Tensor:
    """``[1, H, T, D]``, or ``[B, H, q, D]`` if each row has q tokens, to ``[T, H, D]``; a view if q is 0 or 1."""
    states = states.transpose(1, 2)
    if new_tokens > 1:
        return states.flatten(0, 1)
    return states.squeeze(1 if new_tokens else 0)


AttentionInterface.register(NAME, attention_forward)
