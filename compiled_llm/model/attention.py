"""The attention function that HuggingFace's layers reach while our graphs are traced."""

# Every attention layer calls the function registered under its config's implementation name, with its own keys and
# values of the new tokens and with whatever keyword arguments ``forward`` was given. Ours writes them into the layer's
# pages and attends over the row's pages. Shapes: T packed tokens (decode: q of each row), H query heads, K kv heads, D
# head dimension.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn, sigmoid
from transformers import AttentionInterface

from compiled_llm.kinds.kind import AttentionCall, Layer
from compiled_llm.kinds.rows import Rows, StateRows, packed
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.layer_probe import LayerProbe, UnpagedCallError

NAME = "compiled_llm"
BATCH_ARGUMENT = "paged_batch"


class PagedBatch(NamedTuple):
    """The batch as the layers need it: where its tokens go, and where its rows lie."""

    pages: list[Tensor]  # the memory of each layer, and then those of further specs
    specs: tuple[KVCacheSpec, ...]  # of each layer, and then of what some keep besides
    rows: Rows  # where new tokens go, and the table of their rows' pages
    layers: Sequence[Layer] = ()  # of the model
    cache: Any = None  # what stands in for HuggingFace's cache; None if nothing does
    # where the states of rows lie; None if no layer has any. Their memories follow those of ``specs``
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
    paged_batch: PagedBatch | LayerProbe | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend over pages, by HuggingFace's protocol; UnpagedCallError unless one of our compiled calls does.

    Args:
        query: ``[1, H, T, D]`` packed, or ``[B, H, q, D]`` in decode.
        key: ``[1, K, T, D]`` or ``[B, K, q, D]``, the new tokens' only; ``value`` is alike, its D may be another.
        attention_mask: None, or what an indexer has read: masked tokens are never stored.
        scaling: factor on the logits; ``D ** -0.5`` if None.
        sliding_window: tokens a query sees, itself included; all if None.
        s_aux: ``[H]`` attention sinks, one more logit a head that takes weight and has no value.
        kwargs: further arguments of the model, of which kinds of layers take some; checked once, by the probe.

    Returns:
        ``[1, T, H, D]`` or ``[B, q, H, D]``, D that of ``value``, and None in place of attention weights.
    """
    if paged_batch is None:
        raise UnpagedCallError(
            "paged attention was called without pages: inside a compiled call, call the wrapped model itself, not its "
            "inner modules or another model of the same config"
        )
    if isinstance(paged_batch, LayerProbe):
        seen = (attention_mask, sliding_window, softcap, kwargs, s_aux is not None)
        return paged_batch.visit(module, query, key, value, *seen)
    number, rows = cast(int, module.layer_idx), paged_batch.rows
    layer = paged_batch.layers[number]
    new, scale = rows.new_tokens, query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        module,
        number,
        (packed(query, new), packed(key, new), packed(value, new)),
        (scale, layer.window_left, softcap or 0.0),
        s_aux is not None,
        kwargs,
        paged_batch.cache,
    )
    out, lse = layer.kind.attend(rows, call, paged_batch.pages[number], paged_batch.specs[number].scales)
    if s_aux is not None and lse is not None:
        out = out * sigmoid(lse * math.log(2) - s_aux.float())[..., None].to(out.dtype)
    return out.view(query.shape[0], query.shape[2], query.shape[1], out.shape[2]), None


AttentionInterface.register(NAME, attention_forward)
