"""Arguments that FlashInfer's functions have in common: those that are left out here, scales, positions, dtypes."""

# Shapes: H query heads.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEFT_OUT = {
    "backend": 'use "auto": kernels are those of compiled_llm_ops; with cuDNN, offsets count numbers, not tokens',
    "block_tables": "give the pages in indices: FlashInfer's fa2 does not read block_tables either",
    "jit_args": "register_variant, and call paged_attention_variant or decode_attention_variant",
    "jit_kwargs": "register_variant, and call paged_attention_variant or decode_attention_variant",
    "kv_cache_sf": "use pages of 16 bits, or of torch.float8_e4m3fn with k_scale and v_scale",
    "max_item_len_ptr": "give the items' mask as custom_mask",
    "o_indptr": "outputs lie where the queries do: use qo_indptr",
    "o_scale": "multiply the result",
    "prefix_len_ptr": "give the items' mask as custom_mask",
    "profiler_buffer": "use torch.profiler",
    "sinks": "multiply the result by torch.sigmoid(lse * math.log(2) - sinks)[..., None]",
    "skip_softmax_threshold_scale_factor": "leave it out: all keys are read",
    "token_pos_in_items_ptr": "give the items' mask as custom_mask",
    "use_profiler": "use torch.profiler",
    "v_indptr": "values lie where the keys do: use kv_indptr",
}
"""Arguments that are not here, and what to do instead."""

BACKENDS = ("auto", "fa2", "fa3", "cutlass", "trtllm-gen", "cute-dsl")
"""FlashInfer's backends whose calls mean the same here."""

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")  # values of ``pos_encoding_mode``


def refuse(**given: Any) -> None:
    """Raise NotImplementedError, with its value and the way out, for the first argument that is not None."""
    for name, value in given.items():
        if value is not None:
            shown = f"tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}={shown} is left out of this API; {LEFT_OUT[name]}")


def fp8_scales(args: tuple[Scale, ...]) -> tuple[Scale, Scale, Scale]:
    """Return scales of queries, keys and values, which ``run`` takes after the states, or none; else TypeError."""
    if len(args) not in (0, 3):
        raise TypeError(f"run takes scale_q, scale_k and scale_v after the states, or none of them; got {len(args)}")
    return (None, None, None) if not args else (args[0], args[1], args[2])


def check_backend(backend: str) -> None:
    """Raise NotImplementedError for a backend of FlashInfer whose calls mean something else."""
    if backend not in BACKENDS:
        refuse(backend=backend)


class Positions(NamedTuple):
    """The way logits depend on positions, as ``strided_attention`` takes it."""

    slopes: Tensor | None = None  # ``[H]`` float32 of ALiBi, or None
    rope_scale: float = 0.0  # positions are divided by it; 0.0 if nothing is rotated
    rope_theta: float = 0.0  # base of the rotary embedding; 0.0 if nothing is rotated


def positions(
    pos_encoding_mode: str, heads: int, device: torch.device, rope_scale: float | None, rope_theta: float | None
) -> Positions:
    """Return what a ``pos_encoding_mode`` means for so many query heads; KeyError if there is no such mode."""
    if pos_encoding_mode not in MODES:
        raise KeyError(
            f"pos_encoding_mode={pos_encoding_mode!r} does not exist; use one of {', '.join(map(repr, MODES))}"
        )
    if pos_encoding_mode == "ALIBI":
        return Positions(slopes=alibi_slopes(heads, device))
    if pos_encoding_mode == "ROPE_LLAMA":
        return Positions(None, 1.0 if rope_scale is None else rope_scale, 1e4 if rope_theta is None else rope_theta)
    return Positions()


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """``[H]`` float32: ``2 ** (-8 i / n)`` (https://arxiv.org/abs/2108.12409), n a power of two; others lie between."""
    whole = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, whole + 1, device=device, dtype=torch.float32) * (-8.0 / whole)
    between = torch.arange(1, 2 * (heads - whole) + 1, 2, device=device, dtype=torch.float32) * (-4.0 / whole)
    return torch.exp2(torch.cat([exponents, between]))


def softmax_scale(sm_scale: float | None, head_dim: int) -> float:
    """Return the factor on logits, ``D ** -0.5`` if None is given."""
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale


Scale = float | Tensor | None
"""A number, or float32 ``[1]``, ``[]``, ``[K]`` or ``[H]``, of kv or of query heads; None for 1."""


def by_query_head(name: str, scale: Tensor, heads: int) -> Tensor:
    """Return scales as ``[H]`` float32; ValueError if they are neither of query heads, nor of kv heads, nor one."""
    own = scale.reshape(-1).to(torch.float32)
    if heads % own.shape[0]:
        raise ValueError(f"{name} must be a number, or one for each head; got {tuple(scale.shape)} for {heads} heads")
    return own.repeat_interleave(heads // own.shape[0])


class Scales(NamedTuple):
    """A product of scales: a number, and factors by query head, ``[H]`` float32 or None."""

    number: float
    factors: Tensor | None


def product(heads: int, number: float, scales: dict[str, Scale]) -> Scales:
    """Return the product of a number and of scales, by the names of their arguments, that may be tensors."""
    factors = None
    for name, scale in scales.items():
        if isinstance(scale, Tensor):
            own = by_query_head(name, scale, heads)
            factors = own if factors is None else factors * own
        elif scale is not None:
            number = number * scale
    return Scales(number, factors)


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype by its name, or as it is; TypeError if it is neither."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or the name of one; got {dtype!r}")
    return found


class DataTypes(NamedTuple):
    """Dtypes of queries, of keys and values, and of results, as planned."""

    query: torch.dtype
    states: torch.dtype
    result: torch.dtype

    def check(self, query: Tensor, keys: Tensor) -> None:
        """Raise ValueError if tensors have other dtypes than was planned."""
        for name, tensor, planned in (("q", query, self.query), ("k", keys, self.states)):
            if tensor.dtype != planned:
                raise ValueError(f"{name} must be {planned}, as planned; got {tensor.dtype}: plan with its dtype")


def data_types(
    q_data_type: str | torch.dtype, kv_data_type: str | torch.dtype | None, o_data_type: str | torch.dtype | None
) -> DataTypes:
    """Return dtypes by FlashInfer's defaults: those of queries."""
    query = as_dtype(q_data_type)
    others = (query if dtype is None else as_dtype(dtype) for dtype in (kv_data_type, o_data_type))
    return DataTypes(query, *others)


def results_like(
    out: Tensor | None, lse: Tensor | None, wants_lse: bool, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return what results and, if wanted or given, their log-sum-exps are written to, as of ``result_like``."""
    out = result_like("out", out, shape, dtype, like)
    if wants_lse or lse is not None:
        lse = result_like("lse", lse, shape[:2], torch.float32, like)
    return out, lse


def result_like(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return the tensor that results are written to, a new one if none is given; ValueError if it has another form."""
    if given is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if given.shape != shape or given.dtype != dtype or given.device != like.device:
        raise ValueError(
            f"{name} must be {tuple(shape)} {dtype} on {like.device}; got {tuple(given.shape)} {given.dtype} on "
            f"{given.device}"
        )
    return given
