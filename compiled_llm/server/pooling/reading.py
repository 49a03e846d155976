"""Prompts are sent to the engine process, and their vectors, or the log-probabilities of two tokens, read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from fastapi import Request

from compiled_llm.protocol.messages import Ranking
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Completion
from compiled_llm.requests.pooling.embeddings import POOLED
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import ApiError
from compiled_llm.server.openai.common.api_server import api_server_of
from compiled_llm.server.openai.fields.sampling import WaitingFields
from compiled_llm.server.pooling.response import PooledUsage

T = TypeVar("T")


class PooledRead(NamedTuple):
    """What was read of each prompt, and how many tokens they had together."""

    vectors: list[array[float]]
    tokens: int

    @property
    def usage(self) -> PooledUsage:
        return PooledUsage(prompt_tokens=self.tokens, total_tokens=self.tokens)


async def vectors_of(
    request: Request, body: WaitingFields, prompts: Sequence[list[int]], paths: Sequence[str]
) -> PooledRead:
    """Return the vectors of prompts; ApiError, which names a field by its path, if one has none."""
    handles = await _answered(request, body, prompts, POOLED, pooled=True)
    found = [_had(_only(handle).pooled, handle, path) for handle, path in zip(handles, paths, strict=True)]
    return PooledRead(found, sum(map(len, prompts)))


async def scores_of(
    request: Request, body: WaitingFields, prompts: Sequence[list[int]], paths: Sequence[str], ranking: Ranking
) -> PooledRead:
    """Return a score of each prompt: a classifier's, or how much likelier one token is than another, as logarithm."""
    if ranking.tokens is None:
        return await vectors_of(request, body, prompts, paths)
    yes, no = ranking.tokens
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprob_token_ids=ranking.tokens)
    handles = await _answered(request, body, prompts, params)
    found: list[array[float]] = []
    for handle, path in zip(handles, paths, strict=True):
        (place,) = _had(_only(handle).logprobs or None, handle, path)
        found.append(array("f", [place[yes].logprob - place[no].logprob]))
    return PooledRead(found, sum(map(len, prompts)))


async def _answered(
    request: Request, body: WaitingFields, prompts: Sequence[list[int]], params: SamplingParams, pooled: bool = False
) -> list[RequestHandle]:
    """Answer prompts, at once as many as a request can ask for, and the others after them."""
    api_server = api_server_of(request)
    handles, most = list[RequestHandle](), api_server.settings.max_choices
    for start in range(0, len(prompts), most):
        group = prompts[start : start + most]
        answers = await api_server.submit(request, group, params, "input", body, None, pooled=pooled)
        try:
            await answers.ended()
        finally:
            answers.close()
        handles += answers.handles
    return handles


def _only(handle: RequestHandle) -> Completion:
    return handle.answers[0].completion()


def _had(found: T | None, handle: RequestHandle, path: str) -> T:
    """Return what was found; ApiError if the request has ended before."""
    if found is None:
        raise ApiError(408, f"{path}: its time was over before it was read", path, handle.answers[0].finish_reason)
    return found
