"""Pictures as users give them: objects of Pillow's, files or bytes, opened within limits."""

# Pillow is imported with the first picture. A picture's header says how large it is, before anything is decoded.

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP")
_ADDRESS = re.compile(r"data:|[a-zA-Z][a-zA-Z0-9+.-]+://")
_MOST_PIXELS = 1 << 26
_MOST_BYTES = 1 << 26


def opened(picture: Any) -> Image:
    """Return a picture in RGB, turned as its camera says; ValueError if it is none, too large or damaged.

    Args:
        picture: an ``Image`` of Pillow's, a path, or the bytes of a file: PNG, JPEG or WebP.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ValueError("prompt: pictures need Pillow; pip install pillow") from error

    image = picture if isinstance(picture, Image.Image) else None
    try:
        if image is None:
            image = Image.open(_file(picture), formats=_FORMATS)
        _check(image)
        turned = ImageOps.exif_transpose(image)
        return turned.convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError(f"prompt: a picture is none of {', '.join(_FORMATS)}; convert it first") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"prompt: a picture cannot be read ({error})") from error


def _file(picture: Any) -> Any:
    """Return what Pillow opens: a path, or bytes as a file."""
    if isinstance(picture, (bytes, bytearray, memoryview)):
        _check_bytes(len(picture))
        return io.BytesIO(picture)
    if isinstance(picture, str) and _ADDRESS.match(picture):
        raise ValueError("prompt: the engine fetches no pictures from addresses; give the path or the bytes of a file")
    if isinstance(picture, (str, os.PathLike)):
        path = Path(picture)
        _check_bytes(path.stat().st_size)
        return path
    raise ValueError(
        f"prompt: a picture is a {type(picture).__name__}; give an Image of Pillow's, or the path or bytes of a file"
    )


def _check_bytes(count: int) -> None:
    if count > _MOST_BYTES:
        raise ValueError(f"prompt: a picture has {count} bytes, and at most {_MOST_BYTES} are read; make it smaller")


def _check(image: Image) -> None:
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise ValueError(
            f"prompt: a picture has {width} x {height} pixels, and at most {_MOST_PIXELS} are decoded; make it smaller"
        )
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise ValueError(f"prompt: a picture has {frames} frames, and animations are not served; give one of them")
