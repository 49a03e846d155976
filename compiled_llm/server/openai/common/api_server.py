"""Shared by the endpoints: the engine process, the settings, and the way from a request to its answers."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from starlette.requests import Request

from compiled_llm.features import needed
from compiled_llm.protocol.messages import ImagePrompt, Ready
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import ApiError, invalid, not_served
from compiled_llm.server.http.worker_thread import in_thread_if_long
from compiled_llm.server.openai.common.answers import CHARACTERS, Answers
from compiled_llm.server.openai.common.engine_link import EngineLink, Model
from compiled_llm.server.openai.fields.logprobs import check_prompt_logprobs
from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.fields.sampling import SamplingFields, WaitingFields
from compiled_llm.server.parts import SERVED_IMAGES
from compiled_llm.server.settings import ApiServerSettings

REQUEST_ID, SUBMITTED = "compiled_llm.request_id", "compiled_llm.submitted"
"""Where the scope of a request has its id in the log, and what it has begun, for whoever traces it."""


class Submitted(NamedTuple):
    """The requests of a call; it ``came`` when the engine process was asked, in nanoseconds since 1970."""

    model: str
    params: SamplingParams
    handles: Sequence[RequestHandle]
    came: int


class Shown(NamedTuple):
    """The images of a prompt: their files, the paths of the fields that have them, and pixels that one may have."""

    files: Sequence[bytes]
    paths: Sequence[str]
    max_pixels: int

    def image_prompt(self, text: str) -> ImagePrompt:
        """Return the prompt, of which ``text`` is what the chat template has written."""
        return ImagePrompt(text, list(self.files), self.max_pixels)

    def named(self, param: str) -> dict[str, str]:
        """The fields by the engine's names for them; that of the prompt is ``param``."""
        return {f"images[{number}]": path for number, path in enumerate(self.paths)} | {"prompt:": f"{param}:"}


class ApiServer:
    """The engine process and the settings by which requests are answered."""

    def __init__(self, settings: ApiServerSettings, link: EngineLink) -> None:
        self.settings = settings
        self.link = link
        self.all_ready = True  # whether the server's other API servers, if there are any, can be asked, too

    @property
    def doing(self) -> str:
        return "waiting for the other API servers" if self.link.is_ready and not self.all_ready else self.link.doing

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered by all API servers of the server."""
        return self.link.is_ready and self.all_ready

    def reads_images(self) -> bool:
        """Return whether the model reads images, and requests can have some; False before it is ready."""
        return self.link.is_ready and self.link.model.ready.images and self.settings.limit_mm_per_prompt > 0

    def body_bytes(self) -> int:
        """Return how many bytes the body of a request can have, by what is known of the model."""
        return self.settings.body_bytes(self.reads_images())

    def writer_for(self, name: str | None) -> Model:
        """Return the model; ApiError as of ``model_for``, or if it answers no prompts."""
        model = self.model_for(name)
        if (said := model.ready.pooled.silent) is not None:
            raise not_served(said)
        return model

    def model_for(self, name: str | None) -> Model:
        """Return the model; ApiError if a request names another one, or it is not ready."""
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(404, f"model: there is no {name!r} here; there is {known}", "model", "model_not_found")
        return self.link.model

    async def submit(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        param: str,
        body: WaitingFields,
        form: Form | None,
        shown: Shown | None = None,
        text: str = "",
        pooled: bool = False,
    ) -> Answers:
        """Begin to answer prompts, which are token ids, or one with images, a ``text`` that ``shown`` belongs to.

        ``params`` are for all, or one for each, of one answer; ``pooled`` for vectors in place of answers.

        Raises:
            ApiError: they are too many or too long.
            ValueError: they are impossible.
            EngineProcessError: the engine process is gone.
        """
        model, salt, timeout = self.link.model, self._salt(request, body), self.settings.request_seconds
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        first = each[0]
        self.check_answers(len(prompts), first.n)

        given: Sequence[Sequence[int] | ImagePrompt] = prompts if shown is None else [shown.image_prompt(text)]

        def begun() -> list[RequestHandle]:
            _check(prompts, each, param, model.ready)
            handles: list[RequestHandle] = []
            waiting: dict[str, Any] = {"priority": body.priority or 0, "timeout": timeout, "cache_salt": salt}
            begin: Callable[..., RequestHandle] = partial(model.client.submit, **waiting, pooled=pooled)
            try:
                handles += (begin(prompt, own) for prompt, own in zip(given, each, strict=True))
            except BaseException:
                for handle in handles:
                    handle.cancel()
                raise
            return handles

        came = time.time_ns()
        characters = CHARACTERS * sum(map(len, prompts)) if shown is None else sum(map(len, shown.files))
        handles = await in_thread_if_long(begun, characters)
        named = ({} if form is None else form.named) | ({} if shown is None else shown.named(param))
        limits = self.settings.max_unsent, self.settings.stream_interval
        request.scope[SUBMITTED] = Submitted(body.model or self.settings.names[0], first, handles, came)
        return Answers(handles, request, first.include_stop_str_in_output, *limits, named)

    async def shown(self, given: Sequence[tuple[str, str]], model: Model, body: SamplingFields) -> Shown | None:
        """Return a request's images, each given by the path of its field and where it is; None if there are none.

        Raises:
            ApiError: one cannot be had, or a field does not go with images.
        """
        if not given:
            return None
        images = needed(SERVED_IMAGES)
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(body, name, None) is not None:
                raise invalid(f"{name}: is not served beside images; leave it out", name, "unsupported_value")
        files = await images.read(given, model.ready, self.settings)
        return Shown(files, [path for path, _ in given], self.settings.max_image_pixels)

    def check_answers(self, prompts: int, answers: int) -> None:
        """Check, before its prompts are looked at, how many answers a request asks for; ApiError if too many."""
        if prompts * answers > (most := self.settings.max_choices):
            raise invalid(f"n: {prompts} prompts with {answers} answers each; at most {most} at once", "n")

    def _salt(self, request: Request, body: WaitingFields) -> str | None:
        """Return the salt of a request's cached pages; with ``salts_caches``, of its own key and user."""
        if not self.settings.salts_caches:
            return body.cache_salt
        parts = (request.headers.get("authorization", ""), body.user or "", body.cache_salt or "")
        return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()


def _check(prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams], param: str, ready: Ready) -> None:
    check_prompt_logprobs(prompts, each)
    for prompt, own in zip(prompts, each, strict=True):
        check_prompt(prompt, own, param, ready)


def check_prompt(prompt: Sequence[int], params: SamplingParams, param: str, ready: Ready) -> None:
    """Check that a prompt has tokens of the model, and room for an answer; ApiError if not."""
    check_length(prompt, params, param, ready)
    if prompt and (min(prompt) < 0 or max(prompt) >= ready.vocabulary):
        raise invalid(f"{param}: tokens of the model are from 0 to {ready.vocabulary - 1}", param)


def check_length(prompt: Sequence[int], params: SamplingParams, param: str, ready: Ready) -> None:
    """Check that there is room for an answer to a prompt; ApiError if not."""
    if len(prompt) + (params.max_tokens != 0) > ready.max_tokens:
        raise invalid(
            f"{param}: {len(prompt)} tokens, and with the answer there can be {ready.max_tokens}; shorten it",
            param,
            "context_length_exceeded",
        )


def api_server_of(request: Request) -> ApiServer:
    return cast(ApiServer, request.app.state.api_server)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"
