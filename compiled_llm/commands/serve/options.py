"""The options of `compiled-llm serve` that no other command has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.options.shared import MODEL
from compiled_llm.commands.serve.log import LogFormat, LogLevel
from compiled_llm.commands.serve.serve_command import read_config

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="Take options from a file in YAML, `port: 8000` for --port 8000. The command line goes before it.",
    ),
]

_http = partial(typer.Option, rich_help_panel="HTTP")
_serving = partial(typer.Option, rich_help_panel="Serving")

# ---- HTTP

Host = Annotated[str | None, _http(help="Serve HTTP at this address; 127.0.0.1 unless given.")]
Port = Annotated[int | None, _http(help="Serve HTTP at this port; 8000 unless given, 0 for a free one.")]
ServedModelName = Annotated[
    list[str] | None, _http(metavar="NAME", help="What requests call the model. Several times for several.")
]
ApiKeyFile = Annotated[
    Path | None,
    _http(
        metavar="PATH",
        help="Keys, one a line, of which requests bear one. Beyond 127.0.0.1, this is needed, or COMPILED_LLM_API_KEY.",
    ),
]
AllowedHost = Annotated[
    list[str] | None, _http(metavar="NAME", help="By which clients may call this machine; * for any.")
]
CorsOrigin = Annotated[list[str] | None, _http(metavar="ORIGIN", help="Whose pages may use the server from a browser.")]
SslCertfile = Annotated[Path | None, _http(metavar="PATH", help="For HTTPS, with --ssl-keyfile.")]
SslKeyfile = Annotated[Path | None, _http(metavar="PATH", help="For HTTPS, with --ssl-certfile.")]
RequestSeconds = Annotated[float | None, _http(help="End an answer with what it has after so long.")]
SaltCaches = Annotated[
    bool, _http("--salt-caches", help="Share cached prompts only between requests with one key and user.")
]
EscapeSpecialTokens = Annotated[
    bool,
    _http(
        "--escape-special-tokens", help="Have special tokens in the texts of requests, such as <|im_start|>, be text."
    ),
]
Page = Annotated[bool, _http("--page/--no-page", help="Have a page at / to chat on, with the server's figures.")]
MaxConnections = Annotated[int, _http(help="Have so many connections of clients; refuse others.")]
ClientSeconds = Annotated[
    float,
    _http(
        help="Close the connection of a client that takes longer to send a request, or takes nothing of its answer "
        "for so long."
    ),
]
StreamInterval = Annotated[
    int,
    _http(
        metavar="N",
        help="Send an event of a stream for every N tokens of an answer; the first and the last come at once.",
    ),
]
ApiServerCount = Annotated[
    int | None,
    _http(
        metavar="N",
        help="Read and write HTTP in so many processes, all for one engine process. Unless given, a "
        "quarter as many as cores, 2 to 4; 1 without a GPU, or with fewer than 4 cores.",
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    _http(metavar="URL", help="Send a span of each request there, by OpenTelemetry's protocol over HTTP."),
]

# ---- the engine process

Uds = Annotated[
    Path | None,
    _serving(
        metavar="PATH",
        help="Listen at this Unix socket, which only your user may open; without an option of HTTP there alone.",
    ),
]
OperationsUds = Annotated[
    Path | None,
    _serving(
        metavar="PATH",
        help="Take /sleep, /wake and new weights by HTTP over this Unix socket, which only your user may open.",
    ),
]
MaxNumSeqs = Annotated[int, _serving(help="Run so many requests at once.")]
MaxModelLen = Annotated[
    int | None,
    _serving(
        metavar="TOKENS",
        help="Give a prompt and its answer together at most so many tokens, not all that fit the model.",
    ),
]
MaxQueue = Annotated[int | None, _serving(help="Refuse requests while so many wait.")]
MaxStepMs = Annotated[float | None, _serving(help="Cut prompts so that a step takes at most this long.")]
DrainSeconds = Annotated[
    float, _serving(help="How long requests may go on after SIGTERM or Ctrl-C; the second ends them at once.")
]
Warmup = Annotated[
    str,
    _serving(
        metavar="ROWS",
        help="Compile for these numbers of requests before the first: 1,8,64. Unless given, all up to --max-num-seqs, "
        "on a CPU up to 8.",
    ),
]
ProfilePath = Annotated[
    Path | None,
    _serving(
        metavar="PATH",
        help="Keep in this file which sizes requests use; if it is there, prepare these in place of --warmup.",
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="What pages may take: 0.8 of what is free, 8GiB, or 20000 tokens.", rich_help_panel=MODEL
    ),
]
ShownLevel = Annotated[
    LogLevel, _serving("--log-level", help="Leave out what is less than this; debug adds health checks.")
]
ShownFormat = Annotated[
    LogFormat,
    _serving("--log-format", help="Write the log as lines of text, or of JSON for programs, without progress."),
]
Quiet = Annotated[bool, _serving("--quiet", "-q", help="Show neither progress nor the log.")]
Leashed = Annotated[bool, typer.Option("--leashed", hidden=True, help="End with the process that holds stdin open.")]
