"""The attention function that an encoder's layers reach while our program of it is traced."""

# Shapes: P patches, H heads, D head dimension.

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from compiled_llm.compat.images.vision_encoders import SEGMENTS
from compiled_llm_ops import segment_attention


def segments_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend inside each image, or each window of one, by HuggingFace's protocol.

    Args:
        query: ``[1, H, P, D]``, as ``key`` and ``value``.
        cu_seq_lens_q: ``[N + 1]`` int32, where each begins.
        max_length_q: patches that one has at most; 0 if that is not known.

    Returns:
        ``[1, P, H, D]``, and None in place of attention weights.
    """
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return segment_attention(query, key, value, cu_seq_lens_q, scaling, max_length_q)[None], None


AttentionInterface.register(SEGMENTS, segments_forward)
