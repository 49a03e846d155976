"""The log-probabilities of one request."""

# Those of prompts are kept beside the pages in which a prefix cache keeps these prompts: the cache has keys and values,
# and no logits. Without them, a request that asks for those of its whole prompt would have to compute cached tokens
# again, as evaluations do for many continuations of one context. A page's are dropped with it.
# Shapes: Q tokens of a chunk.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compiled_llm.engine.logprobs.entries import Logprobs
from compiled_llm.engine.logprobs.score_tokens import ScoredTokens
from compiled_llm.engine.logprobs.scores import Scores
from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.request_part import RequestPart
from compiled_llm.engine.steps.plan import RunsApart
from compiled_llm.engine.steps.request import Request
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.requests.columns import ReadAnswer, encoded
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from msgspec import Raw


_SENT_AT_ONCE = 256  # of a prompt's tokens: others wait for some milliseconds


class RequestLogprobs(RequestPart):
    """A request's log-probabilities."""

    # ``most`` is the number of tokens that are wanted besides the sampled ones, the likeliest ones or those ``named``;
    # ``prompt_most`` that of its prompt's likeliest ones; None for none at all. ``scored`` and ``prompt_scored``, from
    # ``first`` on, have those of each token; those of one may be there before it.

    def __init__(self, request: Request, params: SamplingParams, launches: RunsApart) -> None:
        """``launches`` compute what of its prompt is scored."""
        self.request, self._launches = request, launches
        self.named = params.logprob_token_ids
        self.most, self.prompt_most = params.num_logprobs, None if request.index else params.prompt_logprobs
        self.first = params.scored_from
        self.scored, self.prompt_scored = Scores(), Scores()
        self._prefixes: PrefixTree | None = None

    # ---- read

    def rows(self, start: int, tokens: Sequence[int]) -> Logprobs | None:
        if self.most is None:
            return None
        return Logprobs(self.scored, tokens, self.most if self.named is None else self.named, start)

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        return {"logprobs": self.rows(0, answer.tokens_after(0))}

    def output(self) -> Mapping[str, Any]:
        return {"prompt_logprobs": self.of_prompt(without=len(self.request.prompt[: self.first]))}

    def of_prompt(self, without: int = 0) -> Logprobs | None:
        """Return those of the prompt's tokens from ``first`` on, as far as computed, after so many None."""
        if self.prompt_most is None:
            return None
        tokens = self.request.prompt[self.first :].tolist()
        return Logprobs(self.prompt_scored, tokens, self.prompt_most, without=without)

    # ---- sent

    takes_long = True

    def encoded_rows(self, start: int, tokens: Sequence[int]) -> Raw | None:
        found = self.rows(start, tokens)
        return None if found is None else encoded(found[:])

    def pieces(self, answer: ReadAnswer) -> Iterator[Raw | None]:
        """Yield those of the prompt, which are all there with the first token, with how many have none before them."""
        while not (self.request.tokens or self.request.done):
            yield None
        if (found := self.of_prompt()) is not None:
            without = len(self.request.prompt[: self.first])
            for start in range(0, max(1, len(found)), _SENT_AT_ONCE):
                yield encoded((without, found[start : start + _SENT_AT_ONCE]))

    # ---- computed

    def unseen(self, start: int) -> int | None:
        """Return the first prompt token from ``start`` on that log-probabilities follow from; None if none are due."""
        at = max(start, self.first - 1 + len(self.prompt_scored))
        return at if self.prompt_most is not None and at < len(self.request.prompt) - 1 else None

    def runs_apart(self, start: int) -> RunsApart | None:
        return self._launches if self.unseen(start) == start else None

    def needs_single_tokens(self, settings: LoopSettings) -> bool:
        return self.most is not None and settings.logprobs_mode == "processed_logprobs"

    def following(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the prompt's tokens that follow ``count`` others from ``start`` on, ``[Q]``; -1 after its last."""
        tokens = self.request.prompt[start + 1 : start + 1 + count]
        return np.concatenate([tokens, np.full(count - len(tokens), -1, np.int64)])

    def score(self, start: int, scored: ScoredTokens) -> None:
        """Have the scores of its prompt's tokens from ``start`` on; it may have some, since it may have begun again."""
        known, first = self.prompt_scored, start - self.first
        if first <= len(known):
            known.extend(scored.packed(self.prompt_most or 0)[len(known) - first :])
        self.keep_with_pages()

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


def _suffices(known: object, num_logprobs: int) -> bool:
    """Whether scores are kept, of as many of the most likely tokens or more."""
    return isinstance(known, Scores) and known.num_logprobs >= num_logprobs
