"""How many tokens a processor makes of images, by their sizes alone: a private method of transformers.

``ProcessorMixin._get_num_multimodal_tokens``, which processors have for vLLM: a server refuses what fits no context
before it decodes images. Without it, or where it fails, images are decoded and counted; ends when it is public.
"""

from __future__ import annotations

from collections.abc import Sequence

_METHOD = "_get_num_multimodal_tokens"


def image_tokens(processor: object, sizes: Sequence[tuple[int, int]]) -> int | None:
    """Return how many tokens images have at least, of which width and height may be exchanged; None if nothing says.

    Args:
        processor: HuggingFace's.
        sizes: their edges, in pixels.
    """
    try:
        count = getattr(processor, _METHOD)
        both = (count(image_sizes=[(one, other), (other, one)])["num_image_tokens"] for one, other in sizes)
        return sum(int(min(tokens)) for tokens in both)
    except Exception:  # of images or of settings that it has no answer for
        return None
