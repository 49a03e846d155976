"""The processor of an engine process, which is loaded with the first picture, with the worker that decodes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from compiled_llm.protocol.messages import Pictured
from compiled_llm.requests.users_code import described
from compiled_llm.server.images.decoder_process import DecoderProcess
from compiled_llm.server.images.messages import Decoded

MAX_PIXELS = 2**26
"""Of a picture, whatever a client says; what an engine decodes itself has as many."""


class ServedProcessor:
    """A processor of HuggingFace's as engines call it, once there is a picture."""

    def __init__(self, load: Callable[[], Any]) -> None:
        """``load`` returns the processor; it runs once, in the thread of the first picture."""
        self._load = load
        self._lock = threading.Lock()
        self._processor: Any = None
        self._process: DecoderProcess | None = None

    def _loaded(self) -> Any:
        with self._lock:
            if self._processor is None:
                self._processor = self._read()
            return self._processor

    def _read(self) -> Any:
        try:
            return self._load()
        except Exception as error:  # a package that it needs is missing, or a file is damaged
            raise RuntimeError(f"prompt: the model's processor cannot be loaded: {described(error)}") from error

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._loaded()(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loaded(), name)

    def prompt(self, pictured: Pictured) -> dict[str, Any]:
        """Return a text with pictures as engines take it; ValueError if one cannot be decoded, or is too many."""
        place = getattr(self._loaded(), "image_token", None)
        places = 0 if place is None else pictured.text.count(place)
        if places not in (0, len(pictured.images)):
            raise ValueError(
                f"prompt: the chat has {places} places of pictures, {place}, for {len(pictured.images)}; texts must "
                "not have this token"
            )
        pixels = min(pictured.max_pixels, MAX_PIXELS)
        images = [self._decoded(number, file, pixels) for number, file in enumerate(pictured.images)]
        return {"prompt": pictured.text, "multi_modal_data": {"image": images}}

    def _decoded(self, number: int, file: bytes, pixels: int) -> Any:
        from PIL import Image

        found = self._decoder().decoded(file, pixels)
        if not isinstance(found, Decoded):
            error = RuntimeError if found.kind == "lost" else ValueError
            raise error(f"images[{number}]: cannot be decoded: {found.message}")
        return Image.frombuffer("RGB", (found.width, found.height), found.pixels, "raw", "RGB", 0, 1)

    def _decoder(self) -> DecoderProcess:
        with self._lock:
            if self._process is None:
                self._process = DecoderProcess()
            return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
