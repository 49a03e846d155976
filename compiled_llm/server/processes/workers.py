"""Several API servers, each in a process of its own, at one port: more than one core can read and write HTTP."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from compiled_llm.server.processes.handover import CANNOT_SERVE, Start
from compiled_llm.server.processes.worker_process import ApiServerProcess
from compiled_llm.server.restarts import Restarts
from compiled_llm.server.serving import SIGNALS

logger = logging.getLogger("compiled_llm.server")

_PAUSE = 0.05  # seconds until connections are accepted again, if one could not be
_PATIENCE = 5.0  # seconds that API servers have to end beyond what their requests have, before they are killed
_LAST_WORDS = 2.0  # seconds that they have if requests are ended at once


class ApiServers:
    """API servers' processes, each connection given to the one that has fewest; one that dies is replaced."""

    # Had each API server accepted for itself, one that wakes up would take all that wait (a shared socket), or chance
    # would decide (``SO_REUSEPORT``), and connections that wait for an API server would die with it. Nor would the port
    # be free before the last of them has ended. See ``Serving``.

    def __init__(self, start: Start, listening: socket.socket, count: int, max_restarts: int = 3) -> None:
        """``count`` of them are sent ``start``; all together may be restarted ``max_restarts`` times in an hour."""
        self.was_ready = self.at_once = False
        self._start = start
        self._listening = listening
        self._count = count
        self._max_restarts = max_restarts
        self._restarts = Restarts(max_restarts)
        self._api_servers: dict[int, ApiServerProcess] = {}
        self._all_ready = self._has_begun = False
        self._taken = asyncio.Event()  # while some API server takes connections
        self._ending = asyncio.Event()
        self._why: str | None = None

    async def answer(self) -> str | None:
        """As of ``Serving``; the first signal lets requests end, the second ends them."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._told_to_end)
        accepting = asyncio.create_task(self._accept())
        running = [asyncio.create_task(self._keep(place)) for place in range(self._count)]
        await self._ending.wait()
        accepting.cancel()
        await asyncio.gather(*running)
        return self._why

    def end(self) -> None:
        """As of ``Serving``; the port is free before the last request has ended."""
        if not self._ending.is_set():
            self._ending.set()
            self._signal(signal.SIGTERM)
            self._kill_after(self._start.settings.drain_seconds + _PATIENCE)

    def _told_to_end(self) -> None:
        if self._ending.is_set():
            self.at_once = True
            self._signal(signal.SIGINT)  # another one: the first may not have been handled yet
            self._kill_after(_LAST_WORDS)
        self.end()

    def _signal(self, number: int) -> None:
        for api_server in self._api_servers.values():
            api_server.signal(number)

    def _kill_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._signal, signal.SIGKILL)

    # ---- processes

    async def _keep(self, place: int) -> None:
        while not self._ending.is_set():
            api_server = ApiServerProcess(self._start, self._changed, counts=place not in self._api_servers)
            self._api_servers[place] = api_server
            try:
                code = await api_server.run()
            except OSError as error:
                self._give_up(f"an API server cannot be started: {error.strerror or error}")
                return
            if not self._ending.is_set():
                self._see_to_end_of(code)

    def _see_to_end_of(self, code: int) -> None:
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
        if self._ending.is_set():
            return
        api_servers = self._api_servers.values()
        if any(api_server.takes for api_server in api_servers):
            self._has_begun = True
            self._taken.set()
        else:
            self._taken.clear()
        counted = [api_server for api_server in api_servers if api_server.counts]
        all_ready = bool(counted) and all(api_server.ready for api_server in counted)
        if all_ready and not self._all_ready:
            logger.info("compiled_llm: ready")
        self._all_ready = all_ready
        self.was_ready |= all_ready
        for api_server in api_servers:
            api_server.tell(all_ready)

    # ---- connections

    async def _accept(self) -> None:
        """Accept connections while an API server takes them; else they wait."""
        self._listening.setblocking(False)
        with self._listening:  # closed at the end: clients that connect then are refused
            while True:
                await self._taken.wait()
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(self._listening)
                except ConnectionAbortedError:
                    continue
                except OSError as error:  # this process has too many files open, or memory is short
                    await self._pause(f"no connection can be accepted: {error.strerror or error}")
                    continue
                with connection:
                    await self._taken.wait()  # the last one may have ended meanwhile
                    if not self._given(connection):
                        await self._pause("no API server takes a connection, and it is closed")
                await asyncio.sleep(0)  # other events have their turn

    async def _pause(self, why: str) -> None:
        logger.warning("compiled_llm: %s", why)
        await asyncio.sleep(_PAUSE)

    def _given(self, connection: socket.socket) -> bool:
        """Give a connection to the API server that has fewest; to one that is not ready only if none is."""
        first = sorted(self._api_servers.values(), key=lambda each: (not each.ready, each.connections))
        return any(api_server.give(connection) for api_server in first)
