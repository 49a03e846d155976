"""How often an image that came again was not encoded again."""

from __future__ import annotations

from typing import NamedTuple


class EncoderCacheStats(NamedTuple):
    """The use of what encoders have made of images, counted since the model's memory was allocated.

    Attributes:
        queries: how often one was looked up, for an image, or for all of a prompt where nothing tells them apart.
        hits: how often it was there.
        nbytes: what all of it takes now.
    """

    queries: int = 0
    hits: int = 0
    nbytes: int = 0
