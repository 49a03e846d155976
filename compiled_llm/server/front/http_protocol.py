"""HTTP by httptools: half of what h11 costs for each event of a stream."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 2**10
"""Of a request, before its body; what is read together with the last of it may be more."""


class LimitedHttpTools(HttpToolsProtocol):
    """Refuses a request whose head does not end; httptools would take it as long as memory lasts."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """Begin with a head."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Go on with the body."""
        self._in_head = False
        super().on_headers_complete()
