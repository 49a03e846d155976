"""The options of `compiled-llm serve` that no other command has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.options.shared import MODEL
from compiled_llm.commands.serve.log import LogFormat, LogLevel
from compiled_llm.commands.serve.serve_command import read_config
from compiled_llm.config import MAX_NUM_SEQS

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="Read options from a YAML file, with `port: 8000` for --port 8000. The command line overrides it.",
    ),
]

_http = partial(typer.Option, rich_help_panel="HTTP")
_serving = partial(typer.Option, rich_help_panel="Serving")

# ---- HTTP

Host = Annotated[str | None, _http(help="Listen for HTTP at this address. The default is 127.0.0.1.")]
Port = Annotated[int | None, _http(help="Listen for HTTP at this port. The default is 8000; 0 takes a free one.")]
ServedModelName = Annotated[
    list[str] | None, _http(metavar="NAME", help="The name of the model in requests. Can be given several times.")
]
ApiKeyFile = Annotated[
    Path | None,
    _http(
        metavar="PATH",
        help="Only answer requests with a key from this file, which has a key on each line. COMPILED_LLM_API_KEY can "
        "hold a key instead. Required if other machines can reach the server.",
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    _http(
        metavar="NAME",
        help="Also accept requests that call this machine by this name, in their Host header; * accepts any name.",
    ),
]
CorsOrigin = Annotated[list[str] | None, _http(metavar="ORIGIN", help="Let web pages from this origin use the server.")]
SslCertfile = Annotated[
    Path | None, _http(metavar="PATH", help="The certificate, to serve HTTPS; needs --ssl-keyfile.")
]
SslKeyfile = Annotated[
    Path | None, _http(metavar="PATH", help="The private key, to serve HTTPS; needs --ssl-certfile.")
]
RequestSeconds = Annotated[float | None, _http(help="Cut off an answer after this many seconds.")]
SaltCaches = Annotated[
    bool, _http("--salt-caches", help="Share cached prompts only between requests that have the same key and user.")
]
EscapeSpecialTokens = Annotated[
    bool,
    _http(
        "--escape-special-tokens",
        help="Read special tokens in the texts of requests, such as <|im_start|>, as ordinary text.",
    ),
]
Page = Annotated[bool, _http("--page/--no-page", help="Serve a chat page at /, which also shows the server's figures.")]
MaxConnections = Annotated[int, _http(help="Accept this many client connections at once, and refuse more.")]
ClientSeconds = Annotated[
    float,
    _http(
        help="Close a connection when its client takes longer than this to send a request, or reads nothing of its "
        "answer for this long."
    ),
]
StreamInterval = Annotated[
    int,
    _http(
        metavar="N",
        help="In a stream, send an event for every N tokens; the first and the last token are sent at once.",
    ),
]
AllowedLocalMediaPath = Annotated[
    Path | None,
    _http(metavar="PATH", help="Let requests name images below this folder by file: URLs."),
]
AllowedMediaDomains = Annotated[
    list[str] | None,
    _http(
        metavar="HOST",
        help="Let requests name images at addresses of this host. Can be given several times.",
    ),
]
MaxBodyBytes = Annotated[
    int | None,
    _http(
        metavar="BYTES",
        help="Refuse longer requests. Default: 8 MiB, or 32 with images.",
    ),
]
MaxImageBytes = Annotated[int, _http(metavar="BYTES", help="Refuse images with larger files.")]
MaxImagePixels = Annotated[int, _http(metavar="PIXELS", help="Refuse images with more pixels.")]
ApiServerCount = Annotated[
    int | None,
    _http(
        metavar="N",
        help="Handle HTTP in this many processes. The default is a quarter of the "
        "number of cores, from 2 to 4, and 1 without a GPU or with fewer than 4 cores.",
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    _http(metavar="URL", help="Send an OpenTelemetry span for each request to this address, by OTLP over HTTP."),
]

# ---- the engine process

Uds = Annotated[
    Path | None,
    _serving(
        metavar="PATH",
        help="Listen at this Unix socket, which only your user can open. HTTP then needs an option of its own.",
    ),
]
OperationsUds = Annotated[
    Path | None,
    _serving(
        metavar="PATH",
        help="Accept /sleep, /wake and new weights over this Unix socket, which only your user can open.",
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    _serving(
        help=f"Run at most this many requests at once; more wait. The default is {MAX_NUM_SEQS}, or what --artifacts "
        "have room for, if that is less."
    ),
]
MaxModelLen = Annotated[
    int | None,
    _serving(
        metavar="TOKENS",
        help="Limit a prompt and its answer, together, to this many tokens. The default is the model's own limit.",
    ),
]
MaxQueue = Annotated[int | None, _serving(help="Refuse further requests while this many are waiting.")]
MaxStepMs = Annotated[
    str,
    _serving(
        metavar="auto|none|MILLISECONDS",
        help="Compute prompts in chunks that keep a step this short; auto keeps gaps short if prompts come often.",
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    _serving(
        metavar="JSON",
        help="Guess tokens from the text of each request, and check several in a step: "
        '\'{"method": "ngram", "num_speculative_tokens": 7}\'.',
    ),
]
LimitMmPerPrompt = Annotated[
    str | None,
    _serving(
        metavar="JSON",
        help="Images a request can have: '{\"image\": 4}'. 0 disables image input: the vision tower is not loaded.",
    ),
]
MmEncoderCacheGb = Annotated[
    float,
    _serving(
        metavar="GIB",
        help="Cache up to this many GiB of encoded images.",
    ),
]
Pooling = Annotated[
    str | None,
    _serving(
        metavar="last",
        help="Embed texts by their last tokens, where no files of sentence-transformers beside the model say how.",
    ),
]
DrainSeconds = Annotated[
    float,
    _serving(help="After SIGTERM or Ctrl-C, give running requests this long to end; a second one ends them at once."),
]
Warmup = Annotated[
    str,
    _serving(
        metavar="ROWS",
        help="Before the first request, compile and capture batches of these sizes: 1,8,64. The default is all sizes "
        "up to --max-num-seqs, on a CPU up to 8.",
    ),
]
ProfilePath = Annotated[
    Path | None,
    _serving(
        metavar="PATH",
        help="Record in this file which batch sizes are used. If the file exists, prepare those instead of --warmup.",
    ),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache's pages: a fraction of what is free (0.8), a size (8GiB), or '20000 tokens'.",
        rich_help_panel=MODEL,
    ),
]
ShownLevel = Annotated[
    LogLevel, _serving("--log-level", help="Log records of this level and above; debug includes health checks.")
]
ShownFormat = Annotated[
    LogFormat,
    _serving("--log-format", help="Log as text, or as a JSON object a line, without progress."),
]
Quiet = Annotated[bool, _serving("--quiet", "-q", help="Show neither progress nor the log.")]
Leashed = Annotated[bool, typer.Option("--leashed", hidden=True, help="End with the process that holds stdin open.")]
