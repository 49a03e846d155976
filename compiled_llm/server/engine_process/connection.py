"""One client: its messages are read, and the new tokens of all of its requests are sent together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from compiled_llm.protocol.frames import FrameError, Frames, frame_of
from compiled_llm.protocol.messages import (
    VERSION,
    AskStats,
    AskText,
    AskTokens,
    Beat,
    Cancel,
    FromClient,
    Hello,
    Problem,
    Refused,
    StepUpdates,
    Submit,
    Summary,
    Update,
)
from compiled_llm.server.daemon_threads import in_thread
from compiled_llm.server.defaults import MAX_UNSENT
from compiled_llm.server.engine_process.beginnings import Beginnings, cancelled, takes_long
from compiled_llm.server.engine_process.transport import Transport

if TYPE_CHECKING:  # imports torch
    from compiled_llm.server.engine_process.stream import Stream

logger = logging.getLogger("compiled_llm.server")

_AT_ONCE = 2**16  # bytes that are read together
_PATIENCE = 30.0  # seconds that a client has to say hello, and at the end to take the last message
_MAX_ASKING = 8
"""Most texts of one client that are tokenized or detokenized at once; until one is done, no more of it is read."""
_MAX_WAITING = 1000  # messages that wait for a client that does not read, before nothing more is read of it


class Desk(Protocol):
    """An engine process, as its connections use it."""

    def greeting(self) -> list[Struct]: ...

    def begin(self, submit: Submit, wanted: Callable[[], bool] = ...) -> Stream | Refused: ...

    def stats(self, number: int) -> Struct: ...

    def reply(self, question: AskTokens | AskText) -> Struct:
        """Tokenize or detokenize for a client, in any thread."""
        ...


class ClientConnection:
    """A connection to one client, in an event loop; ``wake`` may be called from any thread."""

    def __init__(
        self,
        desk: Desk,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        """``max_unsent``: tokens that wait for a client that does not read, before its requests end."""
        self.streams: dict[int, Stream] = {}  # its requests that have not ended, by their numbers
        self.greeted = False
        self._desk = desk
        self._reader = reader
        self._writer = writer
        self._max_unsent = max_unsent
        self._frames: Frames[FromClient] = Frames(FromClient)
        self._messages: deque[Struct] = deque()
        self._long: set[int] = set()  # requests whose updates take long to write
        self._asking: set[asyncio.Task[None]] = set()  # kept here: an event loop knows its tasks only weakly
        self._beginnings = Beginnings(desk, self._begun)
        # The transport has the socket, and only reads it.
        self._transport = Transport(writer.get_extra_info("socket").dup(), self._due, self._failed)
        self._client = "a client"
        self._ended = False  # whether nothing more is begun

    # ---- what happens

    def send(self, *messages: Struct) -> None:
        """Send messages together, after those before them."""
        self._messages.extend(messages)
        self._transport.flush()

    def wake(self) -> None:
        """Send what is new of its requests; if it does not read, that waits up to a limit."""
        transport = self._transport
        if self._long:
            transport.flush_soon()
        else:
            transport.flush()
        if transport.rest and sum(stream.unsent for stream in self._streams()) > self._max_unsent:
            self.end_all(f"the client has not read, and more than {self._max_unsent:,} tokens wait for it")

    def beat(self) -> None:
        """Say, in any thread, that this process runs, unless something else waits to be sent."""
        if self.greeted and not (self._messages or self._transport.busy):
            self.send(Beat())

    def end_all(self, reason: str) -> None:
        """End its requests with a reason, which is sent with what they have."""
        ending = [stream for stream in self._streams() if not stream.handle.done]
        if ending:
            logger.warning("compiled_llm: %s: requests that end: %d; %s", self._client, len(ending), reason)
        for stream in ending:
            stream.fail(reason)

    def _streams(self) -> list[Stream]:
        return list(self.streams.values())  # at once: another thread may change it

    def close(self) -> None:
        """End the connection; messages that its client has not taken are dropped."""
        self._transport.close()
        self._writer.close()

    @property
    def busy(self) -> bool:
        """Whether the client has not got all of its messages, or will get more."""
        return bool(self.streams or self._beginnings or self._messages) or self._transport.busy

    async def serve(self) -> None:
        """Talk until the client leaves, or has sent bytes that are no frame; its requests end with it."""
        try:
            await self._read()
        except FrameError as error:
            await self._refuse(str(error))
        except OSError as error:
            logger.info("compiled_llm: %s: %s", self._client, error)
        finally:
            self._end_requests()
            self.close()

    def _end_requests(self) -> None:
        self._ended = True
        self._beginnings.cancel_all()
        streams = self._streams()
        self.streams.clear()
        for stream in streams:
            stream.handle.cancel()

    async def _refuse(self, reason: str) -> None:
        logger.warning("compiled_llm: %s: the connection is closed: %s", self._client, reason)
        self._end_requests()
        self.send(Problem(reason))
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._transport.taken(), _PATIENCE)

    # ---- reading

    async def _read(self) -> None:
        hello = await self._hello()
        self._client = hello.client or self._client
        self.send(*self._desk.greeting())
        self.greeted = True
        await self._take(b"")  # what came with the hello
        while data := await self._reader.read(_AT_ONCE):
            await self._take(data)
        self._frames.check_complete()

    async def _hello(self) -> Hello:
        """Wait for the first message, and leave those that came with it for later; FrameError if it is no hello."""
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
            await asyncio.sleep(0)  # others have their turn, and the engine's thread may have the GIL
            if len(self._asking) >= _MAX_ASKING:
                await asyncio.wait(self._asking, return_when=asyncio.FIRST_COMPLETED)
        if len(self._messages) > _MAX_WAITING:
            await self._transport.taken()

    async def _answer(self, question: AskTokens | AskText) -> None:
        self.send(await in_thread(lambda: self._desk.reply(question)))  # a long text takes long

    def _handle(self, message: FromClient) -> None:
        match message:
            case Submit():
                self._begin(message)
            case Cancel(request, index) if request in self._beginnings:
                self._beginnings.cancel(request, index)
            case Cancel(request, index) if (stream := self.streams.get(request)) is not None:
                stream.handle.cancel(index)
            case AskStats(number):
                self.send(self._desk.stats(number))
            case AskTokens() | AskText():
                self._asking.add(task := asyncio.create_task(self._answer(message)))
                task.add_done_callback(self._asking.discard)
            case Hello():
                raise FrameError("a second hello")

    def _begin(self, submit: Submit) -> None:
        if submit.request in self.streams or submit.request in self._beginnings:
            raise FrameError(f"a second request number {submit.request}, and the first has not ended")
        if takes_long(submit):
            self._beginnings.begin(submit)
        else:
            self._begun(submit, self._desk.begin(submit))

    def _begun(self, submit: Submit, begun: Stream | Refused | None) -> None:
        if begun is None:
            self.send(cancelled(submit))
        elif isinstance(begun, Refused):
            self.send(begun)
        elif self._ended:  # its client has left meanwhile
            begun.handle.cancel()
        else:
            if begun.takes_long:
                self._long.add(submit.request)
            self.streams[submit.request] = begun
            if begun.unsent or begun.handle.done:  # before the engine had this listener
                self._transport.flush()

    # ---- writing, in any thread, one at a time

    def _failed(self, error: Exception) -> None:
        if isinstance(error, OSError):  # its client has left, or reads no more
            logger.info("compiled_llm: %s: %s", self._client, error)
        else:
            logger.error("compiled_llm: %s: the connection is closed", self._client, exc_info=error)
        self.close()

    def _due(self) -> list[bytearray]:
        """Return what is to be sent now: messages, then one frame for what is new of all requests."""
        frames: list[bytearray] = []
        while self._messages:
            frames.append(frame_of(self._messages.popleft()))
        updates: list[Update] = []
        summaries: list[Summary] = []
        # A copy, at once: making a pair for each may collect garbage, and with that run a thread that changes it.
        for number, stream in self.streams.copy().items():
            updates += stream.updates()
            if stream.has_pieces and (piece := stream.next_piece()) is not None:
                frames.append(frame_of(piece))
                self._transport.flush_soon()  # for those that are left, after others had their turn
            elif stream.ended:
                summaries.append(stream.summary())
                self.streams.pop(number, None)
                self._long.discard(number)
        if updates or summaries:
            frames.append(frame_of(StepUpdates(updates, summaries)))
        return frames


def _checked(hello: FromClient) -> Hello:
    if not isinstance(hello, Hello):
        raise FrameError("the first message is no hello")
    if hello.version != VERSION:
        raise FrameError(
            f"the client speaks version {hello.version} of the protocol, and this engine process {VERSION}; install "
            "the same compiled-llm for both"
        )
    return hello
