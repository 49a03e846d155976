"""All that can compute a case, by name: ours, flash-linear-attention's, FlashInfer's and HuggingFace's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops import gated_delta_rule, selective_scan
from compiled_llm_ops.kernels.recurrent.chunking import LARGEST_KEY
from recurrent_ops.cases import Inputs

Launch = Callable[[int], Tensor]
"""Makes one launch, told its number; returns the results ``[T, H, V]``, or ``[T, H, P]``."""

TILINGS = tuple((columns, stages, warps) for columns in (16, 32, 64) for stages in (2, 3) for warps in (4, 8))
"""Columns, stages and warps of the kernel that walks over chunks, for ``--fit``."""


class Contender(NamedTuple):
    """One way to compute cases.

    Attributes:
        name: in tables and for ``--contenders``.
        ops: of the layers that it computes.
        prepare: allocates; returns the launch, or why there is none.
    """

    name: str
    ops: tuple[str, ...]
    prepare: Callable[[Inputs], Launch | str]


def ours(inputs: Inputs) -> Launch | str:
    """The op, which chooses by shapes."""
    op = gated_delta_rule if inputs.layer.op == "gated_delta_rule" else selective_scan
    return lambda number: op(*_args(inputs, number))


def by_tokens(inputs: Inputs) -> Launch | str:
    """The kernel that walks from token to token."""
    return _kernel(inputs, "delta_rule.apply", "selective_scan.scan")


def in_chunks(inputs: Inputs) -> Launch | str:
    """The kernels for prompts: those that compute chunks, or Mamba 1's."""
    return _in_chunks(inputs)


def tiled(columns: int, stages: int, warps: int) -> Contender:
    """Chunks, with another tiling."""

    def prepare(inputs: Inputs) -> Launch | str:
        name = "compiled_llm_ops.kernels.recurrent.chunking"
        tiling = importlib.import_module(name).ChunkTiling(columns, stages, warps)
        return _in_chunks(inputs, tiling)

    return Contender(f"ours:chunks:{columns}x{stages}x{warps}", BOTH, prepare)


def fla(inputs: Inputs) -> Launch | str:
    """flash-linear-attention's kernels for prompts, or those for decode."""
    if inputs.device.type != "cuda":
        return "flash-linear-attention needs CUDA"
    package, name = ("kda", "kda") if inputs.layer.finer else ("gated_delta_rule", "gated_delta_rule")
    way = "fused_recurrent" if inputs.case.kind == "decode" else "chunk"
    function = getattr(importlib.import_module(f"fla.ops.{package}"), f"{way}_{name}")
    args, begun = inputs.args, _begun(inputs)
    starts = args[0].qo_indptr.long()

    def launch(number: int) -> Tensor:
        own = args[number % len(args)]
        out, _ = function(
            own.query[None], own.key[None], own.value[None], own.decay[None], beta=own.beta[None], scale=own.scale,
            initial_state=begun[number % len(args)], output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
        )  # fmt: skip
        return out[0]

    return launch


def flashinfer(inputs: Inputs) -> Launch | str:
    """FlashInfer's kernel for prompts; its queries and keys are normalized before, which is not timed."""
    if inputs.device.type != "cuda":
        return "FlashInfer needs CUDA"
    if inputs.layer.finer or inputs.case.kind == "decode":
        return "it has no kernel for prompts with a decay of each channel, and another interface for decode"
    function = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    args, begun = inputs.args, [states.mT.contiguous() for states in _begun(inputs)]
    starts = args[0].qo_indptr.long()
    made = [
        (*(_normalized(each) for each in (own.query, own.key)), own.value, own.decay.exp(), own.beta.float())
        for own in args
    ]
    ended, out = torch.empty_like(begun[0]), torch.empty_like(args[0].value)

    def launch(number: int) -> Tensor:
        function(
            *made[number % len(args)], scale=args[0].scale, initial_state=begun[number % len(args)],
            output_final_state=True, cu_seqlens=starts, output=out, output_state=ended,
        )  # fmt: skip
        return out

    return launch


def huggingface(inputs: Inputs) -> Launch | str:
    """HuggingFace's function in plain PyTorch; heads are repeated before, and rows of other lengths one by one."""
    finer, decodes = inputs.layer.finer, inputs.case.kind == "decode"
    module = importlib.import_module(f"transformers.models.{'kimi_linear.modeling_kimi_linear' if finer else QWEN}")
    names = ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention") if finer else TORCH_DELTA_RULES
    function = inspect.unwrap(getattr(module, names[0 if decodes else 1]))  # not flash-linear-attention's, if there is
    begun = _begun(inputs)
    made = [list(_rows(inputs, number, states)) for number, states in enumerate(begun)]

    def launch(number: int) -> Tensor:
        results = [
            function(*tensors, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]
            for tensors, states in made[number % len(made)]
        ]
        return torch.cat([each.flatten(0, 1) for each in results])

    return launch


BOTH = ("gated_delta_rule", "selective_scan")
DELTA = ("gated_delta_rule",)
QWEN = "qwen3_5.modeling_qwen3_5"
TORCH_DELTA_RULES = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
CONTENDERS = (
    Contender("ours", BOTH, ours),
    Contender("ours:chunks", BOTH, in_chunks),
    Contender("ours:tokens", BOTH, by_tokens),
    Contender("flash-linear-attention", DELTA, fla),
    Contender("flashinfer", DELTA, flashinfer),
    Contender("huggingface:torch", DELTA, huggingface),
)


def named(names: str, fit: bool) -> list[Contender]:
    """Return contenders by their comma-separated names, all by none; ``SystemExit`` if one is not known."""
    known = [*CONTENDERS, *(tiled(*tiling) for tiling in TILINGS)] if fit else list(CONTENDERS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := {*wanted} - {one.name for one in known}:
        raise SystemExit(
            f"--contenders: no {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in known)}"
        )
    return [one for one in known if one.name in wanted or not wanted]


def _args(inputs: Inputs, number: int) -> Any:
    return inputs.args[number % len(inputs.args)]


def _in_chunks(inputs: Inputs, *tiling: Any) -> Launch | str:
    rules = "chunked_channel_rule.apply_channels_in_chunks", "chunked_delta_rule.apply_in_chunks"
    scans = "number_scan.scan_numbers", "chunked_scan.scan_in_chunks"
    number, layer = 0 if inputs.layer.finer else 1, inputs.layer
    key = layer.size if layer.op == "gated_delta_rule" else layer.other
    if key > LARGEST_KEY:
        return f"there are no chunks for keys, or states of Mamba 2, of over {LARGEST_KEY} numbers"
    return _kernel(inputs, rules[number], scans[number], *tiling)


def _kernel(inputs: Inputs, delta_rule: str, scan: str, *more: Any) -> Launch | str:
    if inputs.device.type != "cuda":
        return "Triton needs CUDA"
    module, name = (delta_rule if inputs.layer.op == "gated_delta_rule" else scan).split(".")
    kernel = getattr(importlib.import_module(f"compiled_llm_ops.kernels.recurrent.{module}"), name)

    def launch(number: int) -> Tensor:
        args = _args(inputs, number)
        out = torch.empty_like(args.value if inputs.layer.op == "gated_delta_rule" else args.tokens)
        kernel(args, out, *more)
        return out

    return launch


def _begun(inputs: Inputs) -> list[Tensor]:
    """Return the states that rows begin with, one after the other, as other packages take them."""
    return [args.states[args.read.long()] for args in inputs.args]


def _normalized(states: Tensor) -> Tensor:
    return torch.nn.functional.normalize(states.float(), dim=-1).to(states.dtype)


def _rows(inputs: Inputs, number: int, begun: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield tensors ``[R, L, H, ...]`` of R equal rows, all that there are or one, and their states."""
    args, counts = _args(inputs, number), inputs.case.counts
    group = args.value.shape[1] // args.query.shape[1]
    query, key = (each.repeat_interleave(group, 1) for each in (args.query, args.key))
    tensors, rows = (query, key, args.value, args.decay, args.beta), len(counts)
    if len({*counts}) == 1:
        yield [each.unflatten(0, (rows, counts[0])) for each in tensors], begun
        return
    for row, parts in enumerate(zip(*(each.split(counts) for each in tensors), strict=True)):
        yield [part[None] for part in parts], begun[row : row + 1]
