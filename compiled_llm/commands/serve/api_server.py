"""`compiled-llm api-server`, which only `compiled-llm serve --api-server-count` starts."""

from __future__ import annotations

import sys


def api_server() -> None:
    """Answer the connections that the server's process gives this one, over standard input, which is a socket."""
    import socket

    from compiled_llm.commands.serve.log import show_log
    from compiled_llm.server.processes.handover import receive_start

    end = socket.socket(fileno=sys.stdin.fileno())
    try:
        start = receive_start(end)
    except EOFError:  # the server's process has gone
        return
    if start.log is not None:
        show_log(*start.log)
    from compiled_llm.server.processes.worker import run_given_api_server

    run_given_api_server(start, end)
