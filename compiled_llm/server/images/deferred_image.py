"""Images that are decoded once they are read: until then they take no more memory than their files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from compiled_llm.engine.images.image_files import UnreadError
from compiled_llm.server.images.turns import Asker


class DeferredImage(Image.Image):
    """An image for processors that only pass it on; whoever reads something of it itself has it decoded then.

    Attributes:
        asker: the request that it is of.
        pixels: how many it has at most, until the processor has read it.
    """

    def __init__(self, decode: Callable[[], Image.Image], pixels: int, asker: Asker) -> None:
        super().__init__()
        self._decode, self._is_read = decode, False
        self.pixels, self.asker = pixels, asker

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of at most {self.pixels:,} pixels>"

    def decoded(self) -> Image.Image:
        """Return the image itself, which is not kept here; UnreadError if it cannot be had."""
        try:
            return self._decode()
        except Exception as error:
            raise UnreadError from error

    @property
    def size(self) -> tuple[int, int]:
        self.load()
        return self._size

    @property
    def mode(self) -> str:
        self.load()
        return self._mode

    def load(self) -> Any:
        """Decode the image, and keep it."""
        if not self._is_read:
            image = self.decoded()
            self.im, self._size, self._mode, self._is_read = image.im, image.size, image.mode, True
        return super().load()
