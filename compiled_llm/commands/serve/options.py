"""The options of `compiled-llm serve` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.options.shared import MODEL

_HTTP, _SERVING = "HTTP", "Serving"
"""The panels of ``--help`` that they stand in."""

# ---- HTTP

Host = Annotated[
    str | None, typer.Option(help="Serve HTTP at this address; 127.0.0.1 unless given.", rich_help_panel=_HTTP)
]
Port = Annotated[
    int | None,
    typer.Option(help="Serve HTTP at this port; 8000 unless given, 0 for a free one.", rich_help_panel=_HTTP),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="What requests call the model. Several times for several.", rich_help_panel=_HTTP
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Keys, one a line, of which requests bear one. Needed beyond 127.0.0.1.",
        rich_help_panel=_HTTP,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="By which clients may call this machine; * for any.", rich_help_panel=_HTTP),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(metavar="ORIGIN", help="Whose pages may use the server from a browser.", rich_help_panel=_HTTP),
]
SslCertfile = Annotated[
    Path | None, typer.Option(metavar="PATH", help="For HTTPS, with --ssl-keyfile.", rich_help_panel=_HTTP)
]
SslKeyfile = Annotated[
    Path | None, typer.Option(metavar="PATH", help="For HTTPS, with --ssl-certfile.", rich_help_panel=_HTTP)
]
RequestSeconds = Annotated[
    float | None, typer.Option(help="End an answer with what it has after so long.", rich_help_panel=_HTTP)
]
SaltCaches = Annotated[
    bool,
    typer.Option(
        "--salt-caches",
        help="Share cached prompts only between requests with one key and user.",
        rich_help_panel=_HTTP,
    ),
]
EscapeSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--escape-special-tokens",
        help="Have special tokens in the texts of requests, such as <|im_start|>, be text.",
        rich_help_panel=_HTTP,
    ),
]
Page = Annotated[
    bool,
    typer.Option(
        "--page/--no-page", help="Have a page at / to chat on, with the server's figures.", rich_help_panel=_HTTP
    ),
]
MaxConnections = Annotated[
    int, typer.Option(help="Have so many connections of clients; refuse others.", rich_help_panel=_HTTP)
]
ClientSeconds = Annotated[
    float,
    typer.Option(
        help="Close the connection of a client that takes longer to send a request, or takes nothing of its answer "
        "for so long.",
        rich_help_panel=_HTTP,
    ),
]
StreamInterval = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Send an event of a stream for every N tokens of an answer; the first and the last come at once.",
        rich_help_panel=_HTTP,
    ),
]
ApiServerCount = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Read and write HTTP in so many processes, all for one engine process. Unless given, a "
        "quarter as many as cores, 2 to 4; 1 without a GPU, or with fewer than 4 cores.",
        rich_help_panel=_HTTP,
    ),
]

# ---- the engine process

Uds = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Listen at this Unix socket, which only your user may open; without an option of HTTP there alone.",
        rich_help_panel=_SERVING,
    ),
]
OperationsUds = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Take /sleep, /wake and new weights by HTTP over this Unix socket, which only your user may open.",
        rich_help_panel=_SERVING,
    ),
]
MaxRows = Annotated[int, typer.Option(help="Run so many requests at once.", rich_help_panel=_SERVING)]
MaxQueue = Annotated[int | None, typer.Option(help="Refuse requests while so many wait.", rich_help_panel=_SERVING)]
MaxStepMs = Annotated[
    float | None, typer.Option(help="Cut prompts so that a step takes at most this long.", rich_help_panel=_SERVING)
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        help="How long requests may go on after SIGTERM or Ctrl-C; the second ends them at once.",
        rich_help_panel=_SERVING,
    ),
]
Warmup = Annotated[
    str,
    typer.Option(
        metavar="ROWS",
        help="Compile for these numbers of requests before the first: 1,8,64. Unless given, all up to --max-rows, "
        "on a CPU up to 8.",
        rich_help_panel=_SERVING,
    ),
]
ProfilePath = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Keep in this file which sizes requests use; if it is there, prepare these in place of --warmup.",
        rich_help_panel=_SERVING,
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What pages may take: 0.8 of what is free, 8GiB, or 20000 tokens.",
        rich_help_panel=MODEL,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=_SERVING)]
Leashed = Annotated[bool, typer.Option(hidden=True, help="End with the process that holds stdin open.")]
