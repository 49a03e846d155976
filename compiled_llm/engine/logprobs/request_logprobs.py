"""The log-probabilities of one request."""

# Those of prompts are kept beside the pages in which a prefix cache keeps these prompts: the cache has keys and values,
# and no logits. Without them, a request that asks for those of its whole prompt would have to compute cached tokens
# again, as evaluations do for many continuations of one context. A page's are dropped with it.
# Shapes: Q tokens of a chunk, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from compiled_llm.engine.logprobs.entries import Logprobs
from compiled_llm.engine.logprobs.score_tokens import ScoredTokens, score_tokens
from compiled_llm.engine.logprobs.scores import Scores
from compiled_llm.engine.request_part import RequestPart
from compiled_llm.engine.steps.plan import RunsApart
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.taps import PlanTap
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.sampling_params import SamplingParams


class RequestLogprobs(RequestPart, RunsApart):
    """A request's log-probabilities."""

    # ``most`` is the number of tokens that are wanted besides the sampled ones, the likeliest ones or those ``named``;
    # ``prompt_most`` that of its prompt's likeliest ones; None for none at all. ``scored`` and ``prompt_scored``, from
    # ``first`` on, have those of each token; those of one may be there before it.

    timed = True  # chunks of its prompt take as long as others

    def __init__(self, request: Request, params: SamplingParams) -> None:
        self.request = request
        self.named = params.logprob_token_ids
        self.most, self.prompt_most = params.num_logprobs, None if request.index else params.prompt_logprobs
        self.first = params.scored_from
        self.scored, self.prompt_scored = Scores(), Scores()
        self._prefixes: PrefixTree | None = None

    # ---- read

    def entries(self, tokens: Sequence[int], count: int = 0) -> Logprobs | None:
        """Return the entries of ``tokens`` after the first ``count``; None if they are not wanted."""
        if self.most is None:
            return None
        return Logprobs(self.scored, tokens, self.most if self.named is None else self.named, count)

    def entries_of_prompt(self) -> Logprobs | None:
        """Return the entries of a prompt's tokens, as far as computed, the first ones None; None if not wanted."""
        return self.scored_entries(without=len(self.request.prompt[: self.first]))

    def scored_entries(self, without: int = 0) -> Logprobs | None:
        """Return the entries of a prompt's tokens from ``first`` on, after so many None, as ``entries_of_prompt``."""
        if self.prompt_most is None:
            return None
        tokens = self.request.prompt[self.first :].tolist()
        return Logprobs(self.prompt_scored, tokens, self.prompt_most, without=without)

    # ---- computed

    def unseen(self, start: int) -> int | None:
        """Return the first prompt token from ``start`` on that log-probabilities follow from; None if none are due."""
        at = max(start, self.first - 1 + len(self.prompt_scored))
        return at if self.prompt_most is not None and at < len(self.request.prompt) - 1 else None

    def runs_apart(self, start: int) -> RequestLogprobs | None:
        return self if self.unseen(start) == start else None

    def lets_guess(self, processed_logprobs: bool) -> bool:
        return self.most is None or not processed_logprobs

    def run(
        self,
        model_runner: ModelRunner,
        persistent: PersistentBatch,
        extensions: Sequence[Extension],
        taps: Sequence[PlanTap],
    ) -> Tensor:
        """Run a chunk of its prompt with all logits, without waiting for it; in the model's executor."""
        # Returns ``[1]`` int64, the token that was sampled after it; ``[0]`` if the chunk does not end the prompt.
        (extension,) = extensions
        row, count = cast(Row, extension.row), len(extension.ids)
        start = row.length
        persistent.invalidate_rows([row])
        logits = model_runner.extend([extension], keep=np.arange(count), taps=taps)  # [Q, V]
        following = self.request.prompt[start + 1 : start + 1 + count]
        (tokens,) = model_runner.state.staging.to_device([following])
        numbers = score_tokens(logits[: len(following)], tokens, min(self.prompt_most or 0, logits.shape[1]))
        taps[0].add(ArrivingPrompt(self, start + 1, len(following), model_runner.readbacks.start(numbers)))
        if not extension.is_last:
            return tokens[:0]
        last = logits[-1:].clone()  # all of them would be kept
        return model_runner.sample([row], last, persistent, taps).tokens

    # ---- kept

    def recall(self, prefixes: PrefixTree, again: bool) -> None:
        """Take what is kept of its prompt, from its first token that lacks them on; ``again`` forgets all before."""
        self._prefixes = prefixes
        if again:
            self.prompt_scored = Scores()
        if self.prompt_most is None:
            return
        scored, size = self.prompt_scored, prefixes.page_size
        for page, known in enumerate(prefixes.notes(self.request.prompt, self.request.salt)):
            start, begin = self.first + len(scored), max(1, page * size)
            if start >= (page + 1) * size:
                continue
            if not (isinstance(known, Scores) and _suffices(known, self.prompt_most)):
                return
            scored.extend(known.packed(self.prompt_most)[start - begin :])

    def keep_with_pages(self) -> None:
        """Keep what is known of its prompt, page by page, beside those of its pages that the cache has."""
        prefixes, request = self._prefixes, self.request
        if prefixes is None or request.generation != prefixes.generation:
            return
        scored, size, first = self.prompt_scored, prefixes.page_size, self.first
        end = first + len(scored)

        def of_page(page: int, kept: object) -> object:
            begin, stop = max(1, page * size), (page + 1) * size  # a prompt's first token has none
            known = first <= begin and stop <= end
            sufficient = _suffices(kept, scored.num_logprobs)
            return scored.part(begin - first, stop - first) if known and not sufficient else kept

        if len(scored):
            prefixes.note(request.prompt, of_page, request.salt)


class ArrivingPrompt(NamedTuple):
    """Log-probabilities of ``length`` tokens of a prompt, from ``start`` on, on their way to the host."""

    logprobs: RequestLogprobs
    start: int
    length: int
    readback: Readback

    def hand_out(self) -> Mapping[Request, RequestError]:
        """Give the request those that it does not have: it may have begun again."""
        logprobs, scored = self.logprobs, ScoredTokens.unpacked(self.readback.array(), self.length)
        known, first = logprobs.prompt_scored, self.start - logprobs.first
        if first <= len(known):
            known.extend(scored.packed(logprobs.prompt_most or 0)[len(known) - first :])
        logprobs.keep_with_pages()
        return {}


def _suffices(known: object, num_logprobs: int) -> bool:
    """Whether scores are kept, of as many of the most likely tokens or more."""
    return isinstance(known, Scores) and known.num_logprobs >= num_logprobs
