"""One client: reads what it asks for, and sends what is new of all of its requests together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from compiled_llm.protocol.frames import FrameError, Frames, frame_of
from compiled_llm.protocol.messages import (
    VERSION,
    AskStats,
    Cancel,
    FromClient,
    Hello,
    Problem,
    Refused,
    Step,
    Submit,
)
from compiled_llm.server.defaults import MOST_UNSENT

if TYPE_CHECKING:  # imports torch
    from compiled_llm.server.generator.stream import Stream

logger = logging.getLogger("compiled_llm.server")

_AT_ONCE = 2**16
"""Bytes that are read together."""
_PATIENCE = 30.0
"""Seconds that a client has to say hello, and at the end to take the last message."""
_MOST_WAITING = 1000
"""Messages that wait for a client that does not read, before nothing more is read of it."""


class Desk(Protocol):
    """What connections need of their generator."""

    def greeting(self) -> list[Struct]:
        """Return what a client is told first."""
        ...

    def begin(self, submit: Submit) -> Stream | Refused:
        """Begin a request."""
        ...

    def stats(self, number: int) -> Struct:
        """Answer a question."""
        ...


class Connection:
    """Talks to one client.

    Attributes:
        streams: its requests that have not ended, by their numbers.
        greeted: whether it has said hello, and was told so.
    """

    def __init__(
        self,
        desk: Desk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        most_unsent: int = MOST_UNSENT,
    ) -> None:
        """Begin with somebody who has not said hello.

        Args:
            desk: the generator's.
            reader: of the socket.
            writer: of the socket.
            most_unsent: tokens that wait for a client that does not read, before its requests end.
        """
        self.streams: dict[int, Stream] = {}
        self.greeted = False
        self._desk = desk
        self._reader = reader
        self._writer = writer
        self._most_unsent = most_unsent
        self._frames: Frames[FromClient] = Frames(FromClient)
        self._messages: deque[Struct] = deque()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()  # whether all that was sent has been taken
        self._idle.set()
        self._client = "a client"
        # With a byte that is not taken, further steps wait, and become one frame.
        writer.transport.set_write_buffer_limits(high=0)

    # ---- what happens

    def send(self, message: Struct) -> None:
        """Send a message, after those before it."""
        self._messages.append(message)
        self._changed.set()

    def wake(self) -> None:
        """Send what is new of its requests; if it does not read, that waits up to a limit."""
        self._changed.set()
        if not self._idle.is_set() and sum(stream.unsent for stream in self.streams.values()) > self._most_unsent:
            self.end_all(f"the client has not read, and more than {self._most_unsent:,} tokens wait for it")

    def end_all(self, reason: str) -> None:
        """End its requests with a reason, which is sent with what they have."""
        ending = [stream for stream in self.streams.values() if not stream.handle.done]
        if ending:
            logger.warning("compiled_llm: %s: requests that end: %d; %s", self._client, len(ending), reason)
        for stream in ending:
            stream.fail(reason)

    def close(self) -> None:
        """End the connection; what was sent before still goes out."""
        self._writer.close()

    @property
    def busy(self) -> bool:
        """Whether there is something that the client has not got."""
        return bool(self.streams or self._messages or not self._idle.is_set())

    async def serve(self) -> None:
        """Talk until the client leaves, or has sent what is no frame; its requests end with it."""
        writing = asyncio.create_task(self._write())
        writing.add_done_callback(self._written)
        try:
            await self._read()
        except FrameError as error:
            await self._refuse(writing, str(error))
        except OSError as error:
            logger.info("compiled_llm: %s: %s", self._client, error)
        finally:
            writing.cancel()
            self._leave()

    def _leave(self) -> None:
        for stream in self.streams.values():
            stream.handle.cancel()
        self._writer.close()

    async def _refuse(self, writing: asyncio.Task[None], reason: str) -> None:
        """Say why the connection ends, unless nobody reads it."""
        logger.warning("compiled_llm: %s: the connection is closed: %s", self._client, reason)
        writing.cancel()
        with suppress(OSError, asyncio.TimeoutError):
            self._writer.write(frame_of(Problem(reason)))
            await asyncio.wait_for(self._writer.drain(), _PATIENCE)

    # ---- reading

    async def _read(self) -> None:
        hello = await self._hello()
        self._client = hello.client or self._client
        for message in self._desk.greeting():
            self.send(message)
        self.greeted = True
        await self._take(b"")  # what came with the hello
        while data := await self._reader.read(_AT_ONCE):
            await self._take(data)
        self._frames.check_complete()

    async def _hello(self) -> Hello:
        """Wait for the first message, and leave what came with it for later.

        Raises:
            FrameError: it is no greeting of a client that can be understood.
        """
        while True:
            try:
                data = await asyncio.wait_for(self._reader.read(_AT_ONCE), _PATIENCE)
            except asyncio.TimeoutError:
                raise FrameError(f"no hello within {_PATIENCE:.0f} s") from None
            for message in self._frames.feed(data):
                return _checked(message)
            if not data:
                self._frames.check_complete()
                raise ConnectionError("it left without a word")

    async def _take(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._handle(message)
            await asyncio.sleep(0)  # a step may have ended, of which others are to hear
        if len(self._messages) > _MOST_WAITING:
            await self._idle.wait()

    def _handle(self, message: FromClient) -> None:
        match message:
            case Submit():
                self._begin(message)
            case Cancel(request, index) if (stream := self.streams.get(request)) is not None:
                stream.handle.cancel(index)
            case AskStats(number):
                self.send(self._desk.stats(number))
            case Hello():
                raise FrameError("a second hello")

    def _begin(self, submit: Submit) -> None:
        if submit.request in self.streams:
            raise FrameError(f"a second request number {submit.request}, and the first has not ended")
        begun = self._desk.begin(submit)
        if isinstance(begun, Refused):
            self.send(begun)
        else:
            self.streams[submit.request] = begun
            self._changed.set()  # a token may have come before anybody listened

    # ---- writing

    async def _write(self) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if frames := list(self._due()):
                    self._idle.clear()
                    self._writer.writelines(frames)
                    await self._writer.drain()
                    self._idle.set()
                await asyncio.sleep(0)
        except OSError:  # whoever reads learns of it, too
            pass
        finally:
            self._idle.set()  # nobody takes any more, and nobody should wait for that

    def _written(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) is not None:
            logger.error("compiled_llm: %s: the connection is closed", self._client, exc_info=error)
            self.close()

    def _due(self) -> Iterator[bytearray]:
        """Yield what is to be sent now: messages, then one frame for what is new of all requests."""
        while self._messages:
            yield frame_of(self._messages.popleft())
        updates, summaries = [], []
        for number, stream in tuple(self.streams.items()):
            updates += stream.updates()
            if not stream.ended:
                continue
            if (scores := stream.prompt_scores()) is not None:
                yield frame_of(scores)
                self._changed.set()  # for those that are left, after others had their turn
            else:
                summaries.append(stream.summary())
                del self.streams[number]
        if updates or summaries:
            yield frame_of(Step(updates, summaries))


def _checked(hello: FromClient) -> Hello:
    if not isinstance(hello, Hello):
        raise FrameError("the first message is no hello")
    if hello.version != VERSION:
        raise FrameError(
            f"the client speaks version {hello.version} of the protocol, and this generator {VERSION}; install the "
            "same compiled-llm for both"
        )
    return hello
