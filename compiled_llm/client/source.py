"""Where the answers of a handle come from, if their engine is in another process."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.client.errors import EngineProcessError
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.protocol.messages import Cancel
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Figures, FinishReason


class ClientSource:
    """A request that was sent over a connection, as its handle uses it."""

    tokenizer_call = "Client(path, tokenizer=...)"
    failure: type[RuntimeError] = EngineProcessError
    is_engine = False

    def __init__(self, client: object, session: ClientSession, number: int) -> None:
        self._client = client  # which ends the connection once nobody keeps it
        self._session, self._number = session, number

    def end(
        self, requests: Sequence[object], index: int | None, reason: FinishReason, error: BaseException | None
    ) -> None:
        self._session.send(Cancel(self._number, index))

    def figures(self, requests: Sequence[object]) -> Figures:
        raise AssertionError("the request has not ended")

    def read(self, handle: RequestHandle) -> None:
        handle.read_text()

    def check_may_wait(self) -> None:
        self._session.check_may_wait()

    def check_process(self) -> None:
        """Let any process wait."""
