"""Where a request's images come from: data in the request, files below one folder, and addresses of named hosts."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from compiled_llm.server.daemon_threads import DaemonThreads, in_thread
from compiled_llm.server.defaults import MAX_REQUEST_PIXELS
from compiled_llm.server.http.api_error import ApiError, invalid
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.images.header import FORMATS, Header, header_of
from compiled_llm.server.settings import ApiServerSettings

_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*)(;base64)?,", re.ASCII | re.IGNORECASE)
_TYPES = frozenset(("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"))
_FETCHING = DaemonThreads(16, "compiled_llm fetching")  # which waits; long texts need threads meanwhile
_SECONDS = 10.0  # that all of fetching one image may take
_LONGEST_ADDRESS = 4096  # characters


class GivenImage(NamedTuple):
    """An image of a request: the path of its field, and what that has."""

    path: str
    url: str


async def files_of(given: Sequence[GivenImage], settings: ApiServerSettings) -> list[bytes]:
    """Return the files of a request's images, of which headers alone were read.

    Raises:
        ApiError: one is too large, not allowed, cannot be had, or is no image, or all together have too many pixels.
    """
    files = await asyncio.gather(*(_file(image, settings) for image in given))
    pixels = 0
    for image, (_, header) in zip(given, files, strict=True):
        pixels += header.pixels
        if pixels > MAX_REQUEST_PIXELS:
            why = f"the request's images up to this one have {pixels:,} pixels, and at most {MAX_REQUEST_PIXELS:,} are "
            raise _too_large(image, f"{why}decoded; make them smaller")
    return [file for file, _ in files]


async def _file(image: GivenImage, settings: ApiServerSettings) -> tuple[bytes, Header]:
    scheme = image.url[:6].lower().partition(":")[0]
    if scheme == "data":
        file = await in_thread_if_long(lambda: _data(image, settings.max_image_bytes), len(image.url))
    elif len(image.url) > _LONGEST_ADDRESS:
        raise invalid(f"{image.path}: is an address of more than {_LONGEST_ADDRESS:,} characters", image.path)
    elif scheme == "file":
        file = await in_thread(lambda: _local(image, settings))
    elif scheme in ("http", "https"):
        file = await in_thread(lambda: _fetched(image, settings), _FETCHING)
    else:
        raise invalid(f"{image.path}: give data:image/png;base64,... or an address", image.path)
    return file, await in_thread_if_long(lambda: _checked(image, file, settings.max_image_pixels), len(file))


def _checked(image: GivenImage, file: bytes, most: int) -> Header:
    """Return the header of a file; ApiError if it is of no image that is decoded."""
    try:
        header = header_of(file)
    except ValueError as error:
        raise invalid(f"{image.path}: {error}", image.path) from None
    if header.pixels > most:
        size = f"{header.width:,} x {header.height:,} pixels"
        raise _too_large(image, f"has {size}, and at most {most:,} are decoded; make it smaller")
    return header


def _too_large(image: GivenImage, why: str) -> ApiError:
    return ApiError(413, f"{image.path}: {why}", image.path, "image_too_large")


# ---- in the request


def _data(image: GivenImage, most: int) -> bytes:
    found = _DATA.match(image.url)
    if found is None or found[3] is None:
        raise invalid(f"{image.path}: give data:image/png;base64,... with the file of an image", image.path)
    if found[1] is not None and found[1].lower() not in _TYPES:
        raise invalid(f"{image.path}: is of type {found[1]}; give {FORMATS}", image.path)
    count = (len(image.url) - found.end()) * 3 // 4
    if count > most + 2:
        raise _too_large(image, f"has about {count:,} bytes, and at most {most:,} are read; make it smaller")
    try:
        return base64.b64decode(image.url[found.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise invalid(f"{image.path}: its data is no base64", image.path) from None


# ---- below a folder


def _local(image: GivenImage, settings: ApiServerSettings) -> bytes:
    """Return a file below the folder that is allowed; whether others exist is not told."""
    folder = settings.allowed_local_media_path
    if folder is None:
        raise invalid(f"{image.path}: files are not read; the server has no --allowed-local-media-path", image.path)
    parts = urlsplit(image.url)
    refused = invalid(
        f"{image.path}: is no file that can be read below the folder of --allowed-local-media-path", image.path
    )
    if parts.netloc not in ("", "localhost"):
        raise refused
    try:
        return _read(Path(unquote(parts.path)), folder.resolve(), image, settings.max_image_bytes)
    except (OSError, ValueError, RuntimeError):
        raise refused from None


def _read(path: Path, folder: Path, image: GivenImage, most: int) -> bytes:
    found = path.resolve(strict=True)
    if not found.is_relative_to(folder):
        raise ValueError("it is elsewhere")
    # Links were followed above: one that takes the place of the file meanwhile is not. A pipe is not waited for.
    descriptor = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        opened = Path(f"/proc/self/fd/{descriptor}")
        if not stat.S_ISREG(status.st_mode) or (opened.exists() and not opened.resolve().is_relative_to(folder)):
            raise ValueError("it is no file, or elsewhere by now")
        if status.st_size > most:
            raise _too_large(image, f"has {status.st_size:,} bytes, and at most {most:,} are read; make it smaller")
        return file.read(most)


# ---- at an address


def _fetched(image: GivenImage, settings: ApiServerSettings) -> bytes:
    from compiled_llm.server.images.fetching import Bounds, TooLargeError, fetched  # with all of HTTP and TLS

    bounds = Bounds(frozenset(settings.allowed_media_domains), settings.max_image_bytes, _SECONDS)
    try:
        return fetched(image.url, bounds)
    except TooLargeError as error:
        raise _too_large(image, str(error)) from None
    except ValueError as error:
        raise invalid(f"{image.path}: {error}", image.path) from None
