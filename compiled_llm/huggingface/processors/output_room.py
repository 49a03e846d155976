"""Whether memory has room for what a call returns of each step: scores, logits, and hidden states."""

from __future__ import annotations

from transformers.generation.stopping_criteria import MaxLengthCriteria

from compiled_llm.huggingface.call.call import PagedCall
from compiled_llm.kvcache.memory import free_bytes
from compiled_llm.model.sizes import logits_width


def check_room(call: PagedCall) -> None:
    """Raise ValueError if memory lacks for the outputs of all steps in the fast loop, where their number is known."""
    # A call whose rows may end early is as in HuggingFace's loop: it takes memory as it goes, after its prompts'.
    if not call.config.return_dict_in_generate:
        return  # before the device is asked for its memory: that takes longer than all else before the first token
    known = all(type(entry) is MaxLengthCriteria for entry in call.criteria)
    steps = call.max_new if known else 1
    scores = _score_bytes(call) * steps if known else 0
    of_a_column = 0 if call.more is None else len(call.input_ids) * call.more.column_bytes(call.runtime.facts.model)
    states = of_a_column * (call.last - call.cache.seen + steps - 1)
    if not (scores or states):
        return
    free = free_bytes(call.model_runner.device)
    rows = len(call.input_ids)
    if scores + states <= free:
        return
    taken = f"{(scores + states) / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; give fewer rows"
    if states > scores:
        raise ValueError(
            f"output_hidden_states: {rows} rows of {call.last + steps - 1} tokens take {taken}, max_new_tokens or "
            "layers, wrap with a smaller kv_memory, or let compiled_llm.Engine give the hidden_states of chosen layers"
        )
    raise ValueError(
        f"output_scores, output_logits: {steps} steps of {rows} rows and {logits_width(call.runtime.facts.model)} "
        f"tokens take {taken} or max_new_tokens, wrap with a smaller kv_memory, or let compiled_llm.Engine give the "
        "logprobs of the most likely tokens"
    )


def _score_bytes(call: PagedCall) -> int:
    """Return what a step's scores and logits take."""
    kinds = 1 + (call.wants_scores("output_scores") and call.wants_scores("output_logits") and bool(call.processors))
    return 4 * len(call.input_ids) * logits_width(call.runtime.facts.model) * kinds if call.wants_scores() else 0
