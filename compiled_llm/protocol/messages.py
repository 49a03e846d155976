"""Messages of the protocol: a client speaks first, with ``Hello``, and the engine process answers with ``Welcome``."""

# Each connection numbers its requests by itself. Messages that are sent in every step are arrays, the others maps;
# fields that a reader does not know are passed over. The garbage collector does not look at those of every step
# (``gc=False``): nothing in them can refer to them.

from __future__ import annotations

from typing import Any, Literal

from msgspec import Raw, Struct, field

VERSION = 6  # of the protocol. It is counted up whenever one side would misunderstand the other.

Kind = Literal["invalid", "full", "unavailable", "failed"]
"""Why a request is refused or has failed: impossible, too many wait, the engine process takes none now, or an error."""

# ---- from clients


class Hello(Struct, tag="hello", frozen=True):
    """A client's first message; ``client`` is its name, for the log."""

    version: int = VERSION
    client: str = ""


class ImagePrompt(Struct, frozen=True):
    """The text of a prompt with images, as a chat template writes it."""

    text: str  # with the model's own text for an image where one stands
    images: list[bytes]  # their files, in the order of their places
    max_pixels: int = 2**26  # that one may have


class Submit(Struct, tag="submit", frozen=True, omit_defaults=True):
    """A prompt to answer, as for ``Engine.submit``."""

    request: int  # its number; no unfinished request of the connection may have it
    prompt: list[int]
    params: dict[str, Any] = {}  # the values of ``SamplingParams`` that are not the defaults, ready for MessagePack
    priority: int = 0
    timeout: float | None = None  # seconds after which it ends with the tokens it has
    cache_salt: str | None = None  # only requests with an equal salt share its pages in the prefix cache
    image_prompt: ImagePrompt | None = field(
        default=None, name="pictured"
    )  # a prompt with images, in place of ``prompt``, which is empty
    wanted: dict[str, Any] = {}  # what its answers have besides tokens, as ``Engine.submit`` is asked for it


class Cancel(Struct, tag="cancel", frozen=True, omit_defaults=True):
    """The end of a request, or of the answer of one index alone. One that has ended already is passed over."""

    request: int
    index: int | None = None


class AskStats(Struct, tag="ask stats", frozen=True):
    """A question for the engine's ``StatsReply``; ``number`` comes back with the answer."""

    number: int


class AskTokens(Struct, tag="ask tokens", frozen=True):
    """A question for the ``TokensReply`` of a text or of a chat's messages, up to the beginning of an answer."""

    number: int
    prompt: str | list[dict[str, Any]]


class AskText(Struct, tag="ask text", frozen=True):
    """A question for the ``TextReply`` of tokens."""

    number: int
    tokens: list[int]
    skip_special_tokens: bool


FromClient = Hello | Submit | Cancel | AskStats | AskTokens | AskText

# ---- from the engine process

Uncompiled = Literal["compiling", "failed"]  # why answers run uncompiled
Activation = Literal["sigmoid", "softmax", "identity"]
_NO_POOLING = "this copy of compiled_llm has no pooling"


class Welcome(Struct, tag="welcome", frozen=True):
    """The answer to ``Hello``: versions of the protocol and of the package, and the engine process's id."""

    version: int
    package: str
    process: int


class Preparing(Struct, tag="preparing", frozen=True, omit_defaults=True):
    """The work of an engine process before it takes requests; sent again with each change."""

    doing: str  # in words
    step: int | None = None  # which of ``steps`` it is, from 1; both are None if they are not counted
    steps: int | None = None


class Embedding(Struct, frozen=True, omit_defaults=True):
    """How embeddings follow from the vectors of a model, as the files beside it say.

    Attributes:
        width: how many numbers a vector has.
        normalizes: whether an embedding is made as long as 1.
        prompts: what texts may begin with, by name.
        default_prompt: the name of that of requests which name none.
    """

    width: int
    normalizes: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class Ranking(Struct, frozen=True, omit_defaults=True):
    """How a query and a document become a prompt, and its score follows from what the model makes of it.

    Attributes:
        tokens: those that say yes and no, by whose scores documents are ranked; None for a classifier's only label.
        chat: options of the chat template that writes query and document as messages of these roles; None for one
            text after the other, as the tokenizer writes pairs.
        in_parts: whether the template takes contents as lists of parts.
        prompt: the system message before them, if there is one.
        activation: what makes a score of a number.
    """

    tokens: tuple[int, int] | None = None
    chat: dict[str, Any] | None = None
    in_parts: bool = False
    prompt: str | None = None
    activation: Activation = "sigmoid"


class Labelling(Struct, frozen=True):
    """The labels of a classifier, by their numbers, and what makes probabilities of its scores."""

    labels: list[str]
    activation: Activation


class Pooled(Struct, frozen=True, omit_defaults=True):
    """What a model makes of whole texts; a sentence in the place of each that it does not make says why."""

    embedding: Embedding | str = _NO_POOLING
    ranking: Ranking | str = _NO_POOLING
    labelling: Labelling | str = _NO_POOLING
    silent: str | None = None  # why it answers no prompts; None if it does


class Ready(Struct, tag="ready", frozen=True):
    """The engine process takes requests.

    Attributes:
        tokenizer: the folder, or the name on the hub, that its tokenizer was loaded from; None if it has none.
        gguf_file: the file in the folder that the tokenizer is in, if it is one.
        chat_template: the text of another chat template than the tokenizer's; None for its own.
        vocabulary: how many token ids prompts can have.
        max_tokens: how many tokens a request may have, prompt and answer together.
        max_num_seqs: how many requests run at once.
        form_ends: tokens that end an answer with ``structured_outputs``; none if there is nothing to compile them.
        sampling: settings of ``SamplingParams`` for requests that leave them out, which clients add.
        images: whether prompts may have images.
        pooled: what the model makes of whole texts, in place of answers.
        uncompiled: why answers run uncompiled, as in ``EngineStats``; the message is sent again when that changes.
    """

    model: str
    vocabulary: int
    eos_token_ids: list[int]
    max_tokens: int
    max_num_seqs: int
    tokenizer: str | None = None
    gguf_file: str | None = None
    form_ends: list[int] = []
    model_type: str = ""
    chat_template: str | None = None
    sampling: dict[str, int | float] = {}
    uncompiled: Uncompiled | None = None
    images: bool = False
    pooled: Pooled = Pooled()


class Ended(Struct, array_like=True, frozen=True, gc=False):
    """The end of an answer; with the finish reason ``"error"``, ``error`` is a sentence, and ``kind`` its kind."""

    finish_reason: Literal["stop", "length", "cancelled", "timeout", "error"]
    stop_reason: int | str | None = None
    error: str | None = None
    kind: Kind = "failed"


class Update(Struct, array_like=True, frozen=True, gc=False):
    """New tokens of one answer."""

    request: int
    index: int
    tokens: list[int]
    columns: dict[str, Raw] | None = None  # what features give these tokens besides, by their names; None for nothing
    ended: Ended | None = None  # None while it runs


class Summary(Struct, array_like=True, frozen=True, gc=False):
    """The figures of a request, once its last answer has ended; it is its last message."""

    request: int
    cached_tokens: int  # how many of the prompt's tokens the prefix cache had
    queue_seconds: float | None  # until it first ran; None if it never did
    first_token_seconds: float | None  # until its first token was read; None if there was none
    seconds: float  # until its last answer ended


class StepUpdates(Struct, tag="step", frozen=True, omit_defaults=True):
    """Updates of all of a client's requests: one step of the engine, or several if the client reads slowly."""

    updates: list[Update]
    summaries: list[Summary] = []


class PromptTokens(Struct, tag="prompt tokens", frozen=True):
    """The tokens of a prompt with images, which only the engine process knows; before its first update."""

    request: int
    tokens: list[int]


class Piece(Struct, tag="piece", frozen=True):
    """A piece of what a feature gives an answer, or its prompt, by itself; several come, before the summary."""

    request: int
    index: int
    column: str  # the feature's name
    data: Raw


class Refused(Struct, tag="refused", frozen=True):
    """A request or question was refused; why, in a sentence."""

    request: int
    kind: Kind
    message: str


class Percentiles(Struct, frozen=True):
    """Percentiles of some waits: half were at most ``p50`` seconds, 99 of 100 at most ``p99``."""

    p50: float
    p99: float


class HistogramCounts(Struct, frozen=True):
    """Waits by their length, as ``Histogram``: counts for each of ``BUCKETS`` and for longer ones, and all seconds."""

    counts: list[int]
    seconds: float


class PageCounts(Struct, frozen=True):
    """The account of pages, or of states of rows; ``used + free + cached`` is ``total``."""

    total: int
    used: int
    free: int
    cached: int


class DraftCounts(Struct, frozen=True):
    """The tokens that were guessed, and those that were right; fields as of ``DraftStats``."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]


class EncoderCacheCounts(Struct, frozen=True):
    """The use of what encoders have made of images; fields as of ``EncoderCacheStats``."""

    queries: int
    hits: int
    nbytes: int


class StatsReply(Struct, tag="stats", frozen=True, kw_only=True):
    """The state of the engine process, with how many clients are connected; fields as of ``EngineStats``."""

    number: int
    connections: int
    running: int
    waiting: int
    finished: int
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    cold_starts: int
    queue_seconds: Percentiles | None
    first_token_seconds: Percentiles | None
    inter_token_seconds: Percentiles | None
    pages: PageCounts | None
    cuda_graphs: int = 0
    mixed_steps: int = 0
    states: PageCounts | None = None
    queue_histogram: HistogramCounts | None = None
    first_token_histogram: HistogramCounts | None = None
    inter_token_histogram: HistogramCounts | None = None
    uncompiled: Uncompiled | None = None
    drafts: DraftCounts | None = None
    encoder_cache: EncoderCacheCounts | None = None


class TokensReply(Struct, tag="tokens", frozen=True):
    """The answer to ``AskTokens``."""

    number: int
    tokens: list[int]


class TextReply(Struct, tag="text", frozen=True):
    """The answer to ``AskText``."""

    number: int
    text: str


Reply = StatsReply | TokensReply | TextReply


class Leaving(Struct, tag="leaving", frozen=True):
    """The engine takes no more requests and ends; running ones may go on for a while. Why, in a sentence."""

    message: str


class Beat(Struct, tag="beat", frozen=True):
    """The process is alive: a thread of its own sends this every few seconds, even while the others are busy."""


class Problem(Struct, tag="problem", frozen=True):
    """The last message before the connection is closed: why, in a sentence."""

    message: str


FromEngine = (
    Welcome
    | Preparing
    | Ready
    | StepUpdates
    | PromptTokens
    | Piece
    | Refused
    | StatsReply
    | TokensReply
    | TextReply
    | Leaving
    | Beat
    | Problem
)
