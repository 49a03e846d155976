"""The worker process that decodes images, which begins each with Pillow in memory."""

from __future__ import annotations

import io

from msgspec import Struct
from PIL import Image, ImageOps, UnidentifiedImageError, features

from compiled_llm.engine.apart.exchange import Failed
from compiled_llm.engine.apart.fork_server import ForkServer
from compiled_llm.engine.images.image_files import coloured, has_further_frames
from compiled_llm.server.images.messages import MAX_BYTES, Decode, Decoded

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class Decoder(ForkServer[Decode]):
    """A worker that forks for each image."""

    library, done = "Pillow", "decoded"

    def __init__(self) -> None:
        super().__init__(Decode, MAX_BYTES)
        Image.MAX_IMAGE_PIXELS = None  # each image has a bound of its own
        Image.init()
        features.check("webp")  # with its library

    def answer(self, task: Decode) -> Struct:
        with Image.open(io.BytesIO(task.file), formats=_FORMATS) as image:
            if image.width * image.height > task.pixels:
                size = f"{image.width:,} x {image.height:,} pixels"
                return Failed("limit", f"it has {size}, and at most {task.pixels:,} are decoded")
            if has_further_frames(image):
                return Failed("invalid", "it is animated, and animations are not served; give one of its frames")
            image.load()
            turned = coloured(ImageOps.exif_transpose(image))
        return Decoded(turned.width, turned.height, "RGBA" if turned.mode == "RGBA" else "RGB", turned.tobytes())

    def describe(self, error: Exception) -> str:
        if isinstance(error, UnidentifiedImageError):
            return "it is damaged, or none of PNG, JPEG, WebP and GIF"
        return f"it is damaged ({error})"
