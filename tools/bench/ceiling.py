"""The decode rate that the device's read bandwidth allows, which is measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

REPEATS = 12
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Return bytes/s that the device reads at best, by a sum or a matrix-vector product."""
    # Both read far more than its caches hold: 4 GiB on CUDA or a quarter of what is free, 512 MiB on a CPU.
    size = 2**29
    if device.type == "cuda":
        size = min(2**32, torch.cuda.mem_get_info(device)[0] // 4)
    numbers = torch.ones(size // 4, device=device)
    best = size / _shortest(lambda: numbers.sum(), device)
    matrix = numbers.view(dtype)[: size // dtype.itemsize // 8192 * 8192].view(-1, 8192)
    vector = torch.ones(8192, device=device, dtype=dtype)
    return max(best, matrix.nbytes / _shortest(lambda: torch.mv(matrix, vector), device))


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    work()
    seconds = _event_seconds if device.type == "cuda" else _wall_seconds
    return min(seconds(work) for _ in range(REPEATS))


def _wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _event_seconds(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def step_bytes(model: PreTrainedModel, context: int, rows: int) -> int | None:
    """Return what a decode step of rows with so many tokens has to read; None for experts, as each takes others."""
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    windows = [context if window is None else min(context, window) for window in _windows(config)]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _weight_bytes(model) + rows * sum(windows) * 2 * heads * size * model.dtype.itemsize


def _windows(config: Any) -> list[int | None]:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in types]


def _weight_bytes(model: PreTrainedModel) -> int:
    """Every weight once, but of an embedding of its own a line for each row, which is left out."""
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs: Any = getattr(embedding, "weight", None)
    if inputs is not None and getattr(head, "weight", None) is not inputs:  # tied ones are read whole by the head
        weights.pop(inputs.data_ptr(), None)
    return sum(weights.values())
