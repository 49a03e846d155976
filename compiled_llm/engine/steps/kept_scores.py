"""Log-probabilities of prompts' tokens, kept beside the pages in which a prefix cache keeps these prompts.

The cache has keys and values, and no logits. Without kept log-probabilities, a request that asks for those of its whole
prompt would have to compute cached tokens again, as evaluations do for many continuations of one context. A page's are
dropped with it.
"""

from __future__ import annotations

from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scores import Scores
from compiled_llm.kvcache.prefix_tree import PrefixTree


def keep_scores(prefixes: PrefixTree, request: Request) -> None:
    """Keep what is known of a request's prompt, page by page, beside those of its pages that the cache has."""
    scored, size, first = request.prompt_scored, prefixes.page_size, request.scored_from
    end = first + len(scored)

    def of_page(page: int, kept: object) -> object:
        begin, stop = max(1, page * size), (page + 1) * size  # a prompt's first token has none
        known = first <= begin and stop <= end
        return scored.part(begin - first, stop - first) if known and not _suffices(kept, scored.num_logprobs) else kept

    if len(scored):
        prefixes.note(request.prompt, of_page, request.salt)


def recall_scores(prefixes: PrefixTree, request: Request) -> None:
    """Give a request what is kept of its prompt, from its first token that lacks them on."""
    if request.prompt_logprobs is None:
        return
    scored, size = request.prompt_scored, prefixes.page_size
    for page, known in enumerate(prefixes.notes(request.prompt, request.salt)):
        start, begin = request.scored_from + len(scored), max(1, page * size)
        if start >= (page + 1) * size:
            continue
        if not (isinstance(known, Scores) and _suffices(known, request.prompt_logprobs)):
            return
        scored.extend(known.packed(request.prompt_logprobs)[start - begin :])


def _suffices(known: object, num_logprobs: int) -> bool:
    """Whether scores are kept, of as many of the most likely tokens or more."""
    return isinstance(known, Scores) and known.num_logprobs >= num_logprobs
