"""The processor of an engine process, which is loaded with the first image, with the worker that decodes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.protocol.messages import ImagePrompt
from compiled_llm.requests.users_code import described

if TYPE_CHECKING:  # imports Pillow
    from compiled_llm.engine.parts import MultimodalProcessor
    from compiled_llm.requests.handle import RequestHandle
    from compiled_llm.server.images.reader import ImageReader


class ServedProcessor:
    """A processor of HuggingFace's as engines call it, once there is an image."""

    def __init__(self, load: Callable[[], MultimodalProcessor]) -> None:
        """``load`` returns the processor; it runs once, in the thread of the first image."""
        self._load = load
        self._lock = threading.Lock()
        self._reader: ImageReader | None = None

    def _loaded(self) -> ImageReader:
        with self._lock:
            if self._reader is None:
                from compiled_llm.server.images.reader import ImageReader

                try:
                    self._reader = ImageReader(self._load())
                except Exception as error:  # a package that it needs is missing, or a file is damaged
                    raise RuntimeError(f"prompt: the model's processor cannot be loaded: {described(error)}") from error
            return self._reader

    def __call__(self, **options: object) -> Mapping[str, Any]:
        made: Mapping[str, Any] = self._loaded().processor(**options)
        return made

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loaded().processor, name)

    def inputs(self, image_prompt: ImagePrompt, max_tokens: int, wanted: Callable[[], bool]) -> Mapping[str, Any]:
        """Return what the processor makes of a text with images; raises as ``ImageReader.inputs``."""
        if not wanted():
            raise UnwantedError
        return self._loaded().inputs(image_prompt, max_tokens, wanted)

    def keep(self, handle: RequestHandle, inputs: Mapping[str, Any]) -> None:
        """Count what a request keeps of its images until it has ended."""
        self._loaded().keep(handle, inputs)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
