"""Chunks of prompts whose tokens' log-probabilities are wanted: separate launches, which keep all logits.

Shapes: Q tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from compiled_llm.compilation.sampling.logprobs import score_tokens
from compiled_llm.engine.steps.outputs.logprobs import ArrivingPrompt, Watch
from compiled_llm.engine.steps.plan import Chunk
from compiled_llm.execution.batch import Tap
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner


def run_scored(
    model_runner: ModelRunner, persistent: PersistentBatch, chunk: Chunk, watch: Watch, taps: Sequence[Tap]
) -> Tensor:
    """Run a chunk without waiting for it; in the model's executor. ``taps`` are those of a ``Batch``.

    Returns:
        ``[1]`` int64, the token that was sampled after it; ``[0]`` if the chunk does not end the prompt.
    """
    request, row, count = chunk.request, chunk.request.running_row, len(chunk.ids)
    start = row.length
    persistent.leave([row])
    logits = model_runner.extend([chunk.extension], keep=np.arange(count), taps=taps)  # [Q, V]
    following = request.prompt[start + 1 : start + 1 + count]
    (tokens,) = model_runner.state.staging.to_device([following])
    most = min(request.prompt_logprobs or 0, logits.shape[1])
    numbers = score_tokens(logits[: len(following)], tokens, most)
    watch.add(ArrivingPrompt(request, start + 1, len(following), model_runner.readbacks.start(numbers)))
    if not chunk.is_last:
        return tokens[:0]
    return model_runner.sample([row], logits[-1:].clone(), persistent, taps).tokens  # all of them would be kept
