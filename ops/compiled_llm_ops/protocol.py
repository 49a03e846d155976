"""What a backend is: kernels for attention over pages on CUDA, and what plans them on the host before a graph runs.

Launchers run inside compiled, possibly captured, graphs. They find the plan that they were given by its address.

Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size.
"""

# A method of a protocol is its docstring.
# pyright: reportReturnType=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm_ops.contracts import AppendPagedKv, Geometry, PagedAttention, PlannedBatch


class Captured(NamedTuple):
    """What launches that are captured in a CUDA graph are fixed to, whatever batch is planned for them later.

    Attributes:
        tokens: T, the most there can be.
        rows: B.
        variant: one of the backend's ``variants``.
    """

    tokens: int
    rows: int
    variant: int


class Plan(Protocol):
    """Where a backend keeps what it decided about one batch, for one attention group, at fixed addresses.

    Keep it as long as anything may launch with it: launches find it by the address of ``tensor``, and only a weak
    reference is kept there.

    Attributes:
        tensor: ``[bytes]`` uint8 on the device, what the kernels read.
        numbers: ``[n]`` int64 on the host, what a launch reads there, all 0 while nothing is planned.
    """

    tensor: Tensor
    numbers: Tensor

    def decide(self, batch: PlannedBatch) -> None:
        """Plan a batch; see ``plan_paged_attention``."""

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        """Attend as planned.

        Args:
            args: ``query`` is ``[T, H, D]`` with D as it is stored.
            out: ``[T, H, D]``, contiguous, written.
            lse: ``[T, H]`` float32, contiguous, written: the log-sum-exp in base 2. None if it is not wanted.
        """


class Workspace(Protocol):
    """What all plans of one model share.

    Attributes:
        buffer: ``[bytes]`` uint8 on the device, what kernels write partial results to within one launch.
    """

    buffer: Tensor

    def load(self, geometry: Geometry) -> None:
        """Begin to build or load the kernels for a geometry on other threads, while this one traces what calls them."""


class Backend(Protocol):
    """Kernels for attention over pages, and what plans them.

    Attributes:
        devices: kinds of devices that it runs on.
        dtypes: types of queries that there are kernels for.
        capturable: whether a CUDA graph may capture its launches; if not, they run between the pieces of one.
        variants: ways to divide a batch among thread blocks, the simplest first.
    """

    devices: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    capturable: bool
    variants: tuple[int, ...]

    def problems(self, builds: bool = True) -> list[str]:
        """Return what is not installed that it needs on CUDA, each with the way out; empty if nothing is missing.

        Args:
            builds: whether its kernels are to be built, if they did not come so.
        """

    def compiler(self) -> str | None:
        """Return the path of the compiler that it builds kernels with; None if there is none, or it needs none."""

    def find_kernels_in(self, folder: Path) -> None:
        """Look for built kernels, each ``NAME/NAME.so``, in a folder before any is built, from now on."""

    def kernels_built(self) -> int:
        """Return how many kernels this process has built, in case it was told of a folder before."""

    def missing_kernel(self, geometry: Geometry) -> str | None:
        """Return why there is no kernel for a geometry, whose head size is not padded yet; None if there is one."""

    def stored_head_dim(self, head_dim: int) -> int:
        """Return the head size that pages must have for heads of size ``head_dim``; the rest stays zero."""

    def best_variant(
        self, groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> int:
        """Return the variant that is fastest for a batch.

        Args:
            groups: the attention groups of the model.
            queries: ``[B]``, new tokens of each row.
            lengths: ``[B]``, all tokens of each row.
            device: where it runs.
        """

    def workspace_bytes(
        self, groups: Sequence[Geometry], device: torch.device, captured: Captured | None = None
    ) -> int:
        """Return the size of the workspace that plans need, in bytes.

        Args:
            groups: the attention groups of the model.
            device: where it runs.
            captured: what launches are fixed to; None for any batch whose launches are not captured.
        """

    def plan_bytes(self, groups: Sequence[Geometry], device: torch.device, tokens: int, rows: int) -> int:
        """Return a size that holds the plan of any batch with at most these tokens and rows, in bytes."""

    def workspace(self, device: torch.device, nbytes: int) -> Workspace:
        """Allocate a workspace, once and before any capture."""

    def new_plan(self, workspace: Any, nbytes: int) -> Plan:
        """Return a plan whose ``tensor`` has ``nbytes``; ``workspace`` is one of this backend's."""

    def append(self, args: AppendPagedKv) -> None:
        """Write keys and values of new tokens, of the pages' head size, into the pages; see ``append_paged_kv``."""


# ---- finding plans

_owners: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


def own(plan: Plan) -> None:
    """Make ``plan`` the one that launches find by the address of its tensor.

    A launch needs integers from the host, ``plan.numbers``, which are no input of ``paged_attention``: cudagraph trees
    cannot record a graph with a host tensor among its inputs. Torch 2.11 raises ("storage data ptrs are not allocated
    in pool") if one reaches an op, and Inductor skips CUDA graphs ("cpu device"). So they stay with their owner.
    """
    _owners[plan.tensor.data_ptr()] = plan


def owner_of(tensor: Tensor) -> Plan:
    """Return the plan whose ``tensor`` this is.

    Raises:
        RuntimeError: it is nobody's, or its owner is gone; a launch would follow a stale or foreign plan.
    """
    plan = _owners.get(tensor.data_ptr())
    if plan is None:
        raise RuntimeError(
            f"paged_attention: no plan lies at {tensor.data_ptr():#x}; on CUDA, make one with new_plan() of a "
            "backend, keep it, and give its tensor to plan_paged_attention() and then to paged_attention()"
        )
    return plan
