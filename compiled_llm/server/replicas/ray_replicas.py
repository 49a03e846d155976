"""Replicas as an API server reaches them: by a handle of Ray Serve, whose errors become ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from compiled_llm.client.errors import EngineBusyError, EngineDeadError
from compiled_llm.protocol.messages import Ready, Submit


class ServeReplicas:
    """Replicas of Ray Serve, whose router chooses one for each request."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def ready(self) -> Ready:
        with _our_errors():
            ready: Ready = await self._handle.ready.remote()
        return ready

    async def answer(self, submit: Submit) -> AsyncIterator[bytes]:
        with _our_errors():
            response = self._streaming.answer.remote(submit)
            try:
                async for data in response:
                    yield data
            finally:
                response.cancel()  # if it has not ended


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except BackPressureError:
        raise EngineBusyError("all replicas have as many requests as they take; try again later") from None
    except (RayActorError, DeploymentUnavailableError) as error:
        raise EngineDeadError("the replica that answered has ended; Ray starts another") from error
