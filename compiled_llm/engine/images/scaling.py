"""How large a processor makes an image before it cuts it to size: a long thin one may become gigabytes."""

from __future__ import annotations

import math
from collections.abc import Mapping


def largest_size(image_processor: object, width: int, height: int) -> tuple[int, int]:
    """Return the longer and the shorter edge that an image has where a processor of HuggingFace's makes it largest."""
    # All other ways to scale end at a size that the processor has, whatever the image's: of both edges, of the longest
    # edge, or of the pixels.
    long, short = max(width, height), min(width, height)
    sizes = [(long, short)]
    if _squares_first(image_processor):
        short = long
        sizes.append((long, short))
    edge = _shortest_edge(getattr(image_processor, "size", None))
    if edge is not None and getattr(image_processor, "do_resize", True):
        sizes.append((-(-edge * long // short), edge))
    return max(sizes, key=math.prod)


def oversized(image_processor: object, width: int, height: int, most: int) -> str | None:
    """Return why an image is too large for a processor, without its subject; None if it is not.

    Args:
        image_processor: HuggingFace's.
        width: of the image, in pixels; which of both is which does not matter.
        height: as ``width``.
        most: how many pixels the processor may make of it.
    """
    long, short = largest_size(image_processor, width, height)
    if long * short <= most:
        return None
    return (
        f"has {width:,} x {height:,} pixels, of which the model's processor makes {long:,} x {short:,}, and at most "
        f"{most:,} are made; cut it, or make it less long"
    )


def _squares_first(image_processor: object) -> bool:
    """Whether images are made squares before they are scaled, as LLaVA's may be; others are scaled first, or cut."""
    scaled_first = any(getattr(image_processor, name, None) for name in ("min_size", "image_grid_pinpoints"))
    pads = getattr(image_processor, "do_pad", None) and hasattr(image_processor, "pad_to_square")
    return bool(pads) and not scaled_first


def _shortest_edge(size: object) -> int | None:
    """Return the edge that images are scaled to, however long the other one becomes; None if that is bounded, too."""
    edges = size if isinstance(size, Mapping) else vars(size) if hasattr(size, "__dict__") else {}
    edge = None if edges.get("longest_edge") else edges.get("shortest_edge")
    return edge if isinstance(edge, int) else None
