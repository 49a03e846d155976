"""The images of requests as the model's processor reads them: bounded by their headers, then decoded one by one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor

from compiled_llm.compat.images.image_tokens import image_tokens
from compiled_llm.engine.images.image_files import UnreadError
from compiled_llm.engine.images.inputs import inputs_of_text
from compiled_llm.engine.images.scaling import largest_size, oversized
from compiled_llm.protocol.messages import ImagePrompt
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.server.defaults import MAX_REQUEST_PIXELS, MOST_IMAGE_PIXELS
from compiled_llm.server.images.decoder_process import DecoderProcess
from compiled_llm.server.images.deferred_image import DeferredImage
from compiled_llm.server.images.header import Header, header_of
from compiled_llm.server.images.messages import Decoded
from compiled_llm.server.images.one_by_one import reading_one_by_one
from compiled_llm.server.images.turns import Asker, Turns

if TYPE_CHECKING:
    from compiled_llm.engine.parts import MultimodalProcessor


class ImageReader:
    """A model's processor, with the worker that decodes what it reads.

    Attributes:
        processor: HuggingFace's, which takes deferred images, too.
    """

    def __init__(self, processor: MultimodalProcessor) -> None:
        self._image_processor = getattr(processor, "image_processor", None)
        self._turns = Turns()
        self.processor = reading_one_by_one(processor, self._turns)
        self._lock = threading.Lock()
        self._decoder: DecoderProcess | None = None

    @property
    def decoder(self) -> DecoderProcess:
        """The worker's process, which is started with the first image."""
        with self._lock:
            if self._decoder is None:
                self._decoder = DecoderProcess()
            return self._decoder

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    def inputs(self, image_prompt: ImagePrompt, max_tokens: int, wanted: Callable[[], bool]) -> Mapping[str, Any]:
        """Return what the processor makes of a text with images, each of which is decoded in its turn.

        Args:
            max_tokens: that the prompt may have.

        Raises:
            ValueError: one cannot be decoded, or they are too large, or too many.
            RuntimeError: the worker has ended.
            UnwantedError: they are not ``wanted`` any more.
        """
        place = getattr(self.processor, "image_token", None)
        places = 0 if place is None else image_prompt.text.count(place)
        if places not in (0, len(image_prompt.images)):
            raise ValueError(
                f"prompt: the chat has {places} places of images, {place}, for {len(image_prompt.images)}; texts must "
                "not have this token"
            )
        headers = [_header(number, file) for number, file in enumerate(image_prompt.images)]
        asker, most = Asker(wanted), min(image_prompt.max_pixels, MOST_IMAGE_PIXELS)
        images = [
            self._deferred(f"images[{number}]", file, header, most, asker)
            for number, (file, header) in enumerate(zip(image_prompt.images, headers, strict=True))
        ]
        if (pixels := sum(image.pixels for image in images)) > MAX_REQUEST_PIXELS:
            raise ValueError(f"prompt: its images have {pixels:,} pixels; at most {MAX_REQUEST_PIXELS:,} are decoded")
        tokens = image_tokens(self.processor, [(header.width, header.height) for header in headers])
        if tokens is not None and tokens > max_tokens:
            raise ValueError(
                f"prompt: its images are {tokens:,} tokens, and it can have {max_tokens:,}; send fewer, or smaller ones"
            )
        try:
            return inputs_of_text(image_prompt.text, images, self.processor)
        except UnreadError as error:
            raise error.__cause__ or error from None

    def keep(self, handle: RequestHandle, inputs: Mapping[str, Any]) -> None:
        """Count what a request keeps of its images until it has ended: the inputs of the model."""
        self._turns.keep(sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor)), handle)

    def _deferred(self, name: str, file: bytes, header: Header, most: int, asker: Asker) -> DeferredImage:
        """Return an image that is decoded once it is read; ValueError if its header says that it is too large."""
        size = header.width, header.height
        if header.pixels > most:
            raise ValueError(f"{name}: has {size[0]:,} x {size[1]:,} pixels, and at most {most:,} are decoded")
        self._check(name, size, most)

        def decode() -> Image.Image:
            image = self._decoded(name, file, header.pixels, asker)
            self._check(name, image.size, most)  # files may have two sizes
            return image

        return DeferredImage(decode, math.prod(largest_size(self._image_processor, *size)), asker)

    def _check(self, name: str, size: tuple[int, int], most: int) -> None:
        if (why := oversized(self._image_processor, *size, most)) is not None:
            raise ValueError(f"{name}: {why}")

    def _decoded(self, name: str, file: bytes, pixels: int, asker: Asker) -> Image.Image:
        found = self.decoder.decoded(file, pixels, asker.wanted)
        if not isinstance(found, Decoded):
            error = RuntimeError if found.kind == "lost" else ValueError
            raise error(f"{name}: cannot be decoded: {found.message}")
        return Image.frombuffer(found.mode, (found.width, found.height), found.pixels, "raw", found.mode, 0, 1)


def _header(number: int, file: bytes) -> Header:
    try:
        return header_of(file)
    except ValueError as error:
        raise ValueError(f"images[{number}]: {error}") from None
