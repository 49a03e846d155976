"""The functions by which the rest of the server uses images."""

# API servers import this module; what an engine process needs alone, which has torch and Pillow, is imported there.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from compiled_llm.protocol.messages import ImagePrompt, Ready
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.images.sources import GivenImage, files_of
from compiled_llm.server.settings import ApiServerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compiled_llm.engine.engine import Engine
    from compiled_llm.requests.handle import RequestHandle
    from compiled_llm.server.images import part as this
    from compiled_llm.server.images.processor import ServedProcessor
    from compiled_llm.server.parts import ServedImagesPart

    checked: ServedImagesPart = this


# ---- in an API server


async def read(given: Sequence[tuple[str, str]], ready: Ready, settings: ApiServerSettings) -> list[bytes]:
    """Return the files of a request's images, each given by the path of its field and what that has.

    Raises:
        ApiError: the model is text-only, there are too many, or one cannot be had.
    """
    images = [GivenImage(*each) for each in given]
    path, most = images[0].path, settings.limit_mm_per_prompt
    if not ready.images:
        raise invalid(f"{path}: {settings.names[0]} reads text alone; serve a vision-language model", path, "no_images")
    if len(images) > most:
        over = images[most].path
        raise invalid(
            f"{over}: the request has {len(images):,} images, and there can be {most} (--limit-mm-per-prompt)", over
        )
    return await files_of(images, settings)


# ---- in an engine process


def processor_of(load: Callable[[], Any]) -> ServedProcessor:
    """Return a processor for an engine; ``load`` is called with the first image."""
    from compiled_llm.server.images.processor import ServedProcessor

    return ServedProcessor(load)


def reads_images(model: PreTrainedModel, processor: object) -> bool:
    """Whether an engine process takes images for a model."""
    from compiled_llm.compat.huggingface import sees_images
    from compiled_llm.server.images.processor import ServedProcessor

    return isinstance(processor, ServedProcessor) and sees_images(model)


def submitted(
    engine: Engine,
    image_prompt: ImagePrompt,
    params: SamplingParams,
    max_tokens: int,
    wanted: Callable[[], bool],
    **waiting: Any,
) -> RequestHandle:
    """Submit a prompt with images once the processor has read them.

    Args:
        max_tokens: that a request may have.
        waiting: further options of ``Engine.submit``.

    Raises:
        ValueError: one cannot be decoded, or is too large; or as ``Engine.submit``.
        UnwantedError: they are not ``wanted`` any more.
    """
    from compiled_llm.server.images.processor import ServedProcessor

    processor = engine.processor
    if not isinstance(processor, ServedProcessor):
        raise ValueError("prompt: it has an image, and the engine process has no processor of its model")
    inputs = processor.inputs(image_prompt, max_tokens - 1, wanted)  # a token is left for the answer
    handle = engine.submit(inputs, params, **waiting)
    processor.keep(handle, inputs)
    return handle
