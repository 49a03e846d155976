"""The options of `compiled-llm serve` that say how HTTP is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HTTP = "HTTP"
"""The panel of ``--help`` that they stand in."""

Host = Annotated[
    str | None, typer.Option(help="Serve HTTP at this address; 127.0.0.1 unless given.", rich_help_panel=HTTP)
]
Port = Annotated[
    int | None,
    typer.Option(help="Serve HTTP at this port; 8000 unless given, 0 for a free one.", rich_help_panel=HTTP),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="What requests call the model. Several times for several.", rich_help_panel=HTTP),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Keys, one a line, of which requests bear one. Needed beyond 127.0.0.1.",
        rich_help_panel=HTTP,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="By which clients may call this machine; * for any.", rich_help_panel=HTTP),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(metavar="ORIGIN", help="Whose pages may use the server from a browser.", rich_help_panel=HTTP),
]
SslCertfile = Annotated[
    Path | None, typer.Option(metavar="PATH", help="For HTTPS, with --ssl-keyfile.", rich_help_panel=HTTP)
]
SslKeyfile = Annotated[
    Path | None, typer.Option(metavar="PATH", help="For HTTPS, with --ssl-certfile.", rich_help_panel=HTTP)
]
RequestSeconds = Annotated[
    float | None, typer.Option(help="End an answer with what it has after so long.", rich_help_panel=HTTP)
]
SaltCaches = Annotated[
    bool,
    typer.Option(
        "--salt-caches",
        help="Share cached prompts only between requests with one key and user.",
        rich_help_panel=HTTP,
    ),
]
Page = Annotated[
    bool,
    typer.Option(
        "--page/--no-page", help="Have a page at / to chat on, with the server's figures.", rich_help_panel=HTTP
    ),
]
MaxConnections = Annotated[
    int, typer.Option(help="Have so many connections of clients; refuse others.", rich_help_panel=HTTP)
]
ClientSeconds = Annotated[
    float,
    typer.Option(
        help="Close the connection of a client that takes longer to send a request, or takes nothing of its answer "
        "for so long.",
        rich_help_panel=HTTP,
    ),
]
ApiServerCount = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Read and write HTTP in so many processes, fronts of the one that runs the model. Unless given, a "
        "quarter as many as cores, 2 to 4; 1 without a GPU, or with fewer than 4 cores.",
        rich_help_panel=HTTP,
    ),
]
