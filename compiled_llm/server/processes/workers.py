"""Several API servers, each in a process of its own, behind one port: more than one core can read and write HTTP."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from prometheus_client.multiprocess import mark_process_dead

from compiled_llm.server.processes.handover import CANNOT_SERVE, Start
from compiled_llm.server.processes.worker_process import ApiServerProcess
from compiled_llm.server.restarts import Restarts
from compiled_llm.server.serving import SIGNALS

logger = logging.getLogger("compiled_llm.server")

_AT_ONCE = 64
"""Connections that are accepted before other events have their turn."""
_PAUSE = 0.05
"""Seconds until connections are accepted again, if nobody could take one."""
_PATIENCE = 5.0
"""Seconds that API servers have to end beyond what their requests have, before they are killed."""
_LAST_WORDS = 2.0
"""Seconds that they have if nobody wants to wait."""


class ApiServers:
    """Accepts connections, and gives each to the API server that has fewest; an API server that dies is replaced.

    Had each API server accepted for itself, one that wakes up would take all that wait (a shared socket), or chance
    would decide (``SO_REUSEPORT``), and connections that wait for an API server would die with it. Nor would the port
    be free before the last of them has ended.

    Attributes:
        was_ready: whether all have been ready at a time, once.
        at_once: whether nobody is to be waited for any more.
    """

    def __init__(
        self,
        start: Start,
        listening: socket.socket,
        count: int,
        max_restarts: int = 3,
    ) -> None:
        """Start nothing yet.

        Args:
            start: what each of them is told.
            listening: where clients connect.
            count: how many there are.
            max_restarts: how often one of them is started again in an hour.
        """
        self.was_ready = self.at_once = False
        self._start = start
        self._listening = listening
        self._max_restarts = max_restarts
        self._restarts = Restarts(max_restarts)
        self._api_servers: list[ApiServerProcess | None] = [None] * count
        self._all_ready = self._has_begun = False
        self._ending = asyncio.Event()
        self._why: str | None = None

    async def run(self) -> str | None:
        """Serve until SIGTERM, Ctrl-C or ``end``; requests may end then, the second signal ends them.

        Returns:
            Why it has ended, if nobody has told it to.
        """
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        for number in SIGNALS:
            loop.add_signal_handler(number, self._told_to_end)
        running = [asyncio.create_task(self._keep(place)) for place in range(len(self._api_servers))]
        try:
            await self._ending.wait()
            await self._let_end(running)
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        return self._why

    def end(self) -> None:
        """Take no more connections, and let requests end."""
        if not self._ending.is_set():
            self._ending.set()
            self._accept_no_more()
            self._listening.close()  # the port is free, and whoever connects is told so
            self._signal(signal.SIGTERM)

    def _told_to_end(self) -> None:
        if self._ending.is_set():
            self.at_once = True
            self._signal(signal.SIGINT)  # another one: the first may not have been handled yet
        self.end()

    def _signal(self, number: int) -> None:
        for api_server in self._alive():
            api_server.signal(number)

    def _alive(self) -> list[ApiServerProcess]:
        return [api_server for api_server in self._api_servers if api_server is not None]

    async def _let_end(self, running: list[asyncio.Task[None]]) -> None:
        """Wait for all of them, as long as requests may go on; then kill those that are left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start.settings.drain_seconds + _PATIENCE
        left: set[asyncio.Task[None]] = set(running)
        while left and loop.time() < deadline:
            if self.at_once:
                deadline = min(deadline, loop.time() + _LAST_WORDS)
            _, left = await asyncio.wait(left, timeout=0.1)
        self._signal(signal.SIGKILL)
        await asyncio.gather(*running)

    # ---- processes

    async def _keep(self, place: int) -> None:
        """Keep one running."""
        first = True
        while not self._ending.is_set():
            api_server = ApiServerProcess(self._start, self._changed, counts=first)
            self._api_servers[place], first = api_server, False
            try:
                code = await api_server.run()
            except OSError as error:
                self._give_up(f"an API server cannot be started: {error.strerror or error}")
                return
            mark_process_dead(api_server.pid, str(self._start.settings.figures))
            if not self._ending.is_set():
                self._see_to_end_of(api_server, code)

    def _see_to_end_of(self, api_server: ApiServerProcess, code: int) -> None:
        if code == CANNOT_SERVE:
            self._give_up("an API server cannot serve; it has said why")
        elif not self._has_begun:
            self._give_up(f"an API server has ended before it took connections (exit code {code})")
        elif not self._restarts.may():
            self._give_up(f"an API server has ended again, after {self._max_restarts} restarts within an hour")
        else:
            logger.error("compiled_llm: an API server has ended (exit code %d), and is started again", code)

    def _give_up(self, why: str) -> None:
        self._why = self._why or why
        self.end()

    def _changed(self) -> None:
        """See whether all are ready, and whether there is somebody to take connections."""
        if self._ending.is_set():
            return
        self._has_begun |= any(api_server.begun for api_server in self._alive())
        counted = [api_server for api_server in self._alive() if api_server.counts]
        all_ready = bool(counted) and all(api_server.ready for api_server in counted)
        if all_ready and not self._all_ready:
            logger.info("compiled_llm: ready")
        self._all_ready = all_ready
        self.was_ready |= all_ready
        for api_server in self._alive():
            api_server.tell(all_ready)
        self._accept_if_taken()

    # ---- connections

    def _accept_if_taken(self) -> None:
        """Accept connections if there is somebody to take them; else they wait."""
        if self._ending.is_set():
            return
        if any(api_server.takes for api_server in self._alive()):
            asyncio.get_running_loop().add_reader(self._listening, self._accept)
        else:
            self._accept_no_more()

    def _accept_no_more(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # this process has too many files open, or memory is short
                self._pause(f"no connection can be accepted: {error.strerror or error}")
                return
            with connection:
                if not self._given(connection):
                    self._pause("no API server takes a connection, and it is closed")
                    return

    def _pause(self, why: str) -> None:
        logger.warning("compiled_llm: %s", why)
        self._accept_no_more()
        asyncio.get_running_loop().call_later(_PAUSE, self._accept_if_taken)

    def _given(self, connection: socket.socket) -> bool:
        """Give a connection to the API server that has fewest; to one that is not ready only if none is."""
        api_servers = sorted(
            (api_server for api_server in self._alive() if api_server.takes),
            key=lambda api_server: (not api_server.ready, api_server.connections),
        )
        return any(api_server.give(connection) for api_server in api_servers)
