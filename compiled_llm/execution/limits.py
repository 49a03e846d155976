"""Whether prompts, and all that they may grow by, fit the model, the batch size and the pages."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.execution.model_runner import ModelRunner


def pages_needed(model_runner: ModelRunner, prompts: Sequence[int], max_new: int, shared: Sequence[int] = ()) -> int:
    """Return how many pages prompts of these lengths may need with all that they may grow by.

    The last token of a row is sampled but never stored.

    Args:
        model_runner: the model's device side.
        prompts: the length of each row.
        max_new: how many tokens a row may grow by.
        shared: how many tokens each row has in common with an earlier one, if any; full pages of them are counted
            once.
    """
    pool = model_runner.pool
    return sum(pool.pages_for(prompt + max_new - 1) for prompt in prompts) - sum(
        common // pool.page_size for common in shared
    )


def check_fits(
    model_runner: ModelRunner, prompts: Sequence[int], max_new: int, needed: int | None = None, beams: int = 1
) -> None:
    """Check that the prompts and all they may grow by fit the model, the batch size and the pages.

    Args:
        model_runner: the model's device side.
        prompts: the length of each row, with what a cache holds of it already.
        max_new: how many tokens a row may grow by.
        needed: how many pages that takes beyond those that the rows have; all of them if None.
        beams: how many rows each prompt is searched with.

    Raises:
        ValueError: they do not; the message has the numbers.
    """
    rows = f"{len(prompts)} rows" if beams == 1 else f"{len(prompts)} beams (num_beams={beams})"
    longest, positions = max(prompts) + max_new, model_runner.max_positions
    if longest > positions:
        raise ValueError(
            f"max_new_tokens={max_new}: with a prompt of {max(prompts)} tokens that makes {longest}, and the model "
            f"has {positions} positions; shorten the prompt or generate at most {max(0, positions - max(prompts))}"
        )
    if len(prompts) > model_runner.max_batch_size:
        raise ValueError(
            f"input_ids: {rows} are more than max_batch_size={model_runner.max_batch_size}; "
            f"{_ways_to_fewer_rows(len(prompts), beams)}, or wrap(model, max_batch_size={len(prompts)})"
        )
    pool = model_runner.pool
    needed = pages_needed(model_runner, prompts, max_new) if needed is None else needed
    if needed > pool.available:
        raise ValueError(
            f"input_ids and max_new_tokens={max_new}: {rows} of up to {longest} tokens need {needed} "
            f"pages of {pool.page_size} tokens, and {pool.available} of {pool.total} are available "
            f"({pool.available * pool.page_size} tokens); shorten or split the batch, drop caches you keep, or wrap "
            "with a larger kv_memory"
        )


def _ways_to_fewer_rows(rows: int, beams: int) -> str:
    ways = (["search with fewer beams"] if beams > 1 else []) + (["split the batch"] if rows > beams else [])
    return ", ".join(ways)
