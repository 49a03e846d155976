"""Images as users give them: objects of Pillow's, files or bytes, opened within limits."""

# Pillow is imported with the first image. An image's header says how large it is, before anything is decoded.

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP")
_ADDRESS = re.compile(r"data:|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
MOST_PIXELS = 1 << 26
_MOST_BYTES = 1 << 26


class UnreadError(Exception):
    """An image that cannot be had while a processor reads it; its cause says why."""


def opened(given: object) -> Image:
    """Return an image as ``coloured``, turned as its camera says; ValueError if it is none, too large or damaged.

    Args:
        given: an ``Image`` of Pillow's, a path, or the bytes of a file: PNG, JPEG or WebP.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ValueError("prompt: images need Pillow; pip install pillow") from error

    image = given if isinstance(given, Image.Image) else None
    try:
        if image is None:
            image = Image.open(_file(given), formats=_FORMATS)
        _check(image)
        return coloured(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise ValueError(f"prompt: an image is none of {', '.join(_FORMATS)}; convert it first") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"prompt: an image cannot be read ({error})") from error


def coloured(image: Image) -> Image:
    """Return an image in RGB; one that may be transparent in RGBA, which ``as_read_by`` is for."""
    transparent = "A" in image.getbands() or image.info.get("transparency") is not None
    return image.convert("RGBA" if transparent else "RGB")


def as_read_by(image_processor: object, image: Image) -> Image:
    """Return an image as a processor is given it: one that reads RGB alone has what is transparent blended onto white.

    Args:
        image_processor: HuggingFace's, which blends by itself if it converts to RGB, as its version does.
        image: in RGB or RGBA.
    """
    if image.mode == "RGB" or getattr(image_processor, "do_convert_rgb", None):
        return image
    from PIL import Image

    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def has_further_frames(image: Image) -> bool:
    """Whether an image is animated; the further images in a camera's JPEG, such as its preview, are no frames."""
    return image.format != "MPO" and getattr(image, "n_frames", 1) > 1


def _file(given: object) -> Path | io.BytesIO:
    """Return what Pillow opens: a path, or bytes as a file."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        _check_bytes(len(given))
        return io.BytesIO(given)
    if isinstance(given, str) and _ADDRESS.match(given):
        raise ValueError("prompt: the engine fetches no images from addresses; give the path or the bytes of a file")
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        _check_bytes(path.stat().st_size)
        return path
    raise ValueError(
        f"prompt: an image is a {type(given).__name__}; give an Image of Pillow's, or the path or bytes of a file"
    )


def _check_bytes(count: int) -> None:
    if count > _MOST_BYTES:
        raise ValueError(f"prompt: an image has {count} bytes, and at most {_MOST_BYTES} are read; make it smaller")


def _check(image: Image) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"prompt: an image has {width} x {height} pixels, and at most {MOST_PIXELS} are decoded; make it smaller"
        )
    if has_further_frames(image):
        frames = getattr(image, "n_frames", 1)
        raise ValueError(f"prompt: an image has {frames} frames, and animations are not served; give one of them")
