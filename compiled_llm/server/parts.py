"""What the server asks of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.features import Seam, Seams

if TYPE_CHECKING:
    from fastapi import APIRouter
    from transformers import PreTrainedModel

    from compiled_llm.engine.engine import Engine
    from compiled_llm.protocol.messages import ImagePrompt, Ready
    from compiled_llm.requests.handle import RequestHandle
    from compiled_llm.requests.sampling_params import SamplingParams
    from compiled_llm.server.settings import ApiServerSettings


class RoutesPart(Protocol):
    """A part with routes."""

    router: APIRouter


class ServedImagesPart(Protocol):
    """The part that reads images of requests: in API servers ``read``, in an engine process all else."""

    async def read(
        self, given: Sequence[tuple[str, str]], ready: Ready, settings: ApiServerSettings
    ) -> list[bytes]: ...
    def processor_of(self, load: Callable[[], Any]) -> object: ...
    def reads_images(self, model: PreTrainedModel, processor: object) -> bool: ...
    def submitted(
        self,
        engine: Engine,
        image_prompt: ImagePrompt,
        params: SamplingParams,
        max_tokens: int,
        wanted: Callable[[], bool],
        **waiting: Any,
    ) -> RequestHandle: ...


class PagePart(RoutesPart, Protocol):
    """The part with a page; its paths need no key."""

    PATHS: tuple[str, ...]


PAGE = Seam[PagePart]("chat page", "server")
ROUTES = Seams[RoutesPart]("server", "router")
SERVED_IMAGES = Seam[ServedImagesPart]("images", "server")
