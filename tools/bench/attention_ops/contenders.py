"""All that can compute a case, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from attention_ops import flash_attention, flashinfer_wrappers as flashinfer, ours, torch_varlen
from attention_ops.cases import KINDS
from attention_ops.inputs import Inputs, Launch


class OpContender(NamedTuple):
    """One way to compute cases.

    Attributes:
        name: in tables and for `--contenders`.
        kinds: the kinds of cases that it can compute.
        prepare: plans and allocates; returns the launch, or why there is none.
        builds: the module of FlashInfer's that it is the first to need, which is built before anything is timed.
        after: the module that it needs as well.
    """

    name: str
    kinds: tuple[str, ...]
    prepare: Callable[[Inputs], Launch | str]
    builds: str = ""
    after: str = ""


BATCHES = ("prefill", "mixed")
ROWS_OF_ONE = ("decode", "shared")
CONTENDERS = (
    OpContender("decode_attention", ROWS_OF_ONE, ours.decode),
    OpContender("cascade_attention", ("shared",), ours.cascade),
    OpContender("decode_attention+paged_attention", ("mixed",), ours.decode_then_planned, "fa2"),
    OpContender("paged_attention", KINDS, ours.planned, "fa2"),
    OpContender("paged_attention:graph", BATCHES, ours.planned_for_graphs, "fa2"),
    OpContender("paged_attention:triton", KINDS, ours.by_triton),
    OpContender("paged_attention:flash-attn", BATCHES, ours.by_flash_attn),
    OpContender("paged_attention:torch", BATCHES, ours.by_torch),
    OpContender("flashinfer:decode", ROWS_OF_ONE, flashinfer.decode, "decode"),
    OpContender("flashinfer:decode-tensor-cores", ROWS_OF_ONE, flashinfer.decode_by_tensor_cores, "fa2"),
    OpContender("flashinfer:cascade", ("shared",), flashinfer.cascade, "fa2"),
    OpContender("flashinfer:fa2", BATCHES, flashinfer.prefill_fa2, "fa2"),
    OpContender("flashinfer:fa3", BATCHES, flashinfer.prefill_fa3, "fa3"),
    OpContender("flashinfer:batch-attention", KINDS, flashinfer.batch_attention, "holistic"),
    OpContender("flashinfer:batch-pod", ("mixed",), flashinfer.batch_pod, "pod", after="fa2"),
    OpContender("flash-attn:256", KINDS, flash_attention.with_table),
    OpContender("flash-attn:3", KINDS, flash_attention.version_3),
    OpContender("torch:varlen", KINDS, torch_varlen.with_table),
)


def named(names: str) -> list[OpContender]:
    """Return contenders by their comma-separated names, all by none; ``SystemExit`` if one is not known."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [one.name for one in CONTENDERS]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--contenders: no {', '.join(unknown)}; there are {', '.join(known)}")
    return [one for one in CONTENDERS if one.name in wanted or not wanted]
