"""A client's connection to an engine process, with what it knows of it; if it is lost, another one follows."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from compiled_llm.client.errors import EngineDeadError
from compiled_llm.client.transport.connection import Line
from compiled_llm.client.transport.session import ClientSession

_PAUSE = 0.05
"""Seconds between two tries to connect."""


class ClientLink:
    """One connection, from the first word to the end.

    Attributes:
        session: what is known of the engine process, and the requests that it has.
        closed: whether this side has ended it.
    """

    def __init__(self) -> None:
        """Connect to nobody yet."""
        self.session = ClientSession()
        self.closed = False
        self._line: Line | None = None

    @property
    def broken(self) -> bool:
        """Whether the other side has ended it, and another one may follow.

        Why an engine process has never been ready is told first.
        """
        session = self.session
        return session.lost is not None and not self.closed and (session.loss_reported or session.ready is not None)

    def connect(self, dial: Callable[[], Line], seconds: float = 0.0) -> None:
        """Connect, and have what comes read from now on.

        Args:
            dial: connects, and says hello.
            seconds: in which somebody may begin to listen.

        Raises:
            EngineDeadError: there is no engine process.
            EngineProcessError: it does not want to talk to this client.
        """
        self._line = _connected(dial, seconds)
        self._line.start(self.session.take, self.session.lose)

    def send(self, message: Struct) -> None:
        """Send a message; if that cannot be, the session learns why.

        Raises:
            ValueError: it is too long.
        """
        assert self._line is not None, "nobody has said who is there"
        self._line.send(message)

    def check_may_wait(self) -> None:
        """Check that this thread may wait for what comes.

        Raises:
            RuntimeError: nothing would come meanwhile.
        """
        assert self._line is not None, "nobody has said who is there"
        self._line.check_may_wait()

    def close(self) -> None:
        """End the connection, and with it its requests."""
        self.closed = True
        self.session.lost = self.session.lost or EngineDeadError("the client is closed; make another one")
        if self._line is not None:
            self._line.close()


def _connected(dial: Callable[[], Line], seconds: float) -> Line:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return dial()
        except EngineDeadError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)
