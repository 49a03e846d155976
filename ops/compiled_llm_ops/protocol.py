"""The interface of a backend: kernels for attention over pages on CUDA, and their plans, made before a graph runs."""

# Launchers run inside compiled, possibly captured, graphs. They find their plan by its address.
# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size.

# A method of a protocol is its docstring.
# pyright: reportReturnType=false

from __future__ import annotations

import importlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm_ops.contracts import SCALED_IN_KERNELS, AppendPagedKv, Geometry, PagedAttention, PlannedBatch
from compiled_llm_ops.contracts.devices import power_of_two


class CapturedLaunch(NamedTuple):
    """The fixed properties of launches captured in a CUDA graph, for any batch planned for them later.

    Attributes:
        tokens: T, the most there can be.
        rows: B.
        schedule: one of the backend's ``schedules``.
    """

    tokens: int
    rows: int
    schedule: int


class Plan(Protocol):
    """A backend's plan of one batch, for one attention group, at fixed addresses.

    Keep it as long as a launch may use it: launches find it by the address of ``tensor``, through a weak reference.

    Attributes:
        tensor: ``[bytes]`` uint8 on the device, read by the kernels.
        numbers: ``[n]`` int64 on the host, read by launches, all 0 before the first plan.
        kernels: those of its backend.
    """

    tensor: Tensor
    numbers: Tensor
    kernels: Mapping[str, Launch]

    def decide(self, batch: PlannedBatch) -> None:
        """Plan a batch; see ``plan_paged_attention``."""

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        """Attend as planned; write ``out`` ``[T, H, D]`` and, if given, ``lse`` ``[T, H]`` float32, in base 2."""


Launch = Callable[[Any, Any, Tensor, Tensor | None], None]
"""Attends as planned: called with the plan, an op's arguments, ``out`` and ``lse``, as ``Plan.launch`` is."""

KERNELS: defaultdict[str, dict[str, Launch]] = defaultdict(dict)
"""The ``kernels`` of our backends, by their names: parts of the ops that can be left out add theirs."""


class Workspace(Protocol):
    """The memory that all plans of one model share.

    Attributes:
        buffer: ``[bytes]`` uint8 on the device, for partial results of kernels within one launch.
    """

    buffer: Tensor

    def load(self, geometry: Geometry) -> None:
        """Begin to build or load the kernels for a geometry on other threads, while this one traces calls of them."""


class Installation(Protocol):
    """The packages, compilers and built kernels of a backend."""

    def problems(self, builds: bool = True) -> list[str]:
        """Return what is missing for CUDA, each with the way out; ``builds``: whether its kernels are to be built."""

    def compiler(self) -> str | None:
        """Return the path of the compiler that it builds kernels with; None if there is none, or it needs none."""

    def find_kernels_in(self, folder: Path) -> None:
        """Look for built kernels, each ``NAME/NAME.so``, in a folder before any is built, from now on."""

    def kernels_built(self) -> int:
        """Return how many kernels this process has built since it was given a folder."""

    def wait_for_builds(self) -> None:
        """Wait for kernels that are built in the background for processes that start later."""


class NothingToBuild:
    """The installation of a backend that needs only what is installed with it."""

    def problems(self, builds: bool = True) -> list[str]:
        return []

    def compiler(self) -> str | None:
        return None

    def find_kernels_in(self, folder: Path) -> None: ...

    def kernels_built(self) -> int:
        return 0

    def wait_for_builds(self) -> None: ...


class DecodeOps(NamedTuple):
    """The ops of decode steps without a plan: each launch reads the page table as it is then.

    They have the schema of ``contracts.DecodeAttention`` with ``pages`` and ``saturated`` written, as
    ``library.define_op`` makes it, and answer as our own do.

    Attributes:
        attend: as ``decode_attention``.
        attend_lse: as ``decode_attention_lse``.
        prepare: whether they norm and rotate queries and keys on CUDA, and keep the rules of ``overlap``; if not, the
            arguments from ``query_norm`` on have their defaults.
        several: whether they take several new tokens of each row.
        joint: others that may take their place, which read pages that rows share once, as those in ``JOINT`` do.
    """

    attend: torch._ops.OpOverload
    attend_lse: torch._ops.OpOverload
    prepare: bool = False
    several: bool = False
    joint: tuple[torch._ops.OpOverload, ...] = ()

    @property
    def overloads(self) -> tuple[torch._ops.OpOverload, ...]:
        return (self.attend, self.attend_lse, *self.joint)


JOINT: list[torch._ops.OpOverload] = []
"""Ops of ours that go with our decode ops; they have the arguments of ``DecodeAttention``, and tables between."""


def own_decode_ops() -> DecodeOps:
    """Return our own: a Triton kernel on CUDA, plain PyTorch on a CPU."""
    ops = torch.ops.compiled_llm
    return DecodeOps(
        ops.decode_attention.default,
        ops.decode_attention_lse.default,
        prepare=True,
        several=True,
        joint=tuple(JOINT),
    )


class Backend(Protocol):
    """Kernels for attention over pages, and their plans.

    Attributes:
        devices: kinds of devices that it runs on.
        dtypes: types of queries that there are kernels for.
        capturable: whether a CUDA graph may capture its launches; if not, they run between the pieces of one.
        kv_dtypes: types that pages may have besides that of the queries.
        kernels: what else its plans launch than ``Plan.launch``, by the kind of layers; those of a kind that is
            missing are refused, or attend by ops of ours that are not planned. ``"uneven heads"``: values may have
            another size than keys; pages are ``[P, K, S, D + E]`` then, and ``Plan.launch`` and ``append`` get them.
            ``"latents"``: arguments of ``planned_latent_attention`` on CUDA, planned again for each token.
            ``"functions"``: arguments of an op whose logits are what ``Geometry.function`` makes of them.
        rope_append: whether on CUDA ``rope_append_paged_kv`` may take the place of ``append`` before its attention; its
            kernel then writes all pages with scales.
        schedules: ways to divide a batch among thread blocks, the simplest first.
        installation: what must be there before it can run.
    """

    devices: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]
    capturable: bool
    kernels: Mapping[str, Launch]
    rope_append: bool
    schedules: tuple[int, ...]
    installation: Installation

    def missing_kernel(self, geometry: Geometry) -> str | None:
        """Return why there is no kernel for a geometry, whose head size is not padded yet; None if there is one."""

    def stored_head_dim(self, head_dim: int) -> int:
        """Return the head size that pages must have for heads of size ``head_dim``; the rest stays zero."""

    def best_schedule(
        self, groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> int:
        """Return the schedule that is fastest for a batch of ``queries`` ``[B]`` new tokens of ``lengths`` ``[B]``."""

    def workspace_bytes(
        self, groups: Sequence[Geometry], device: torch.device, captured: CapturedLaunch | None = None
    ) -> int:
        """Return the size of the workspace that plans need, in bytes; ``captured`` are those of captured launches."""

    def plan_bytes(self, groups: Sequence[Geometry], device: torch.device, tokens: int, rows: int) -> int:
        """Return a size that holds the plan of any batch with at most these tokens and rows, in bytes."""

    def workspace(self, device: torch.device, nbytes: int) -> Workspace:
        """Allocate a workspace, once and before any capture."""

    def new_plan(self, workspace: Any, nbytes: int) -> Plan:
        """Return a plan whose ``tensor`` has ``nbytes``; ``workspace`` is one of this backend's."""

    def append(self, args: AppendPagedKv) -> None:
        """Write keys and values of new tokens, of the pages' head size, into the pages; see ``append_paged_kv``."""

    def decode_ops(self, device: str) -> DecodeOps | None:
        """Return the ops of decode steps on a kind of device; None if they are planned as prefill is."""


# ---- finding plans

_owners: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


def own(plan: Plan) -> None:
    """Make ``plan`` the one that launches find by the address of its tensor."""
    # A launch needs integers from the host, ``plan.numbers``, which are no input of ``paged_attention``: cudagraph
    # trees cannot capture a graph with a host tensor among its inputs. Torch 2.11 raises ("storage data ptrs are not
    # allocated in pool") if one reaches an op, and Inductor skips CUDA graphs ("cpu device"). So they stay with their
    # owner.
    _owners[plan.tensor.data_ptr()] = plan


def plan_of(tensor: Tensor) -> Plan | None:
    """Return the plan whose ``tensor`` this is; None if it has no owner."""
    return _owners.get(tensor.data_ptr())


def owner_of(tensor: Tensor) -> Plan:
    """Return the plan whose ``tensor`` this is; RuntimeError if it is gone: a launch would follow a stale plan."""
    plan = plan_of(tensor)
    if plan is None:
        raise RuntimeError(
            f"paged_attention: no plan lies at {tensor.data_ptr():#x}; on CUDA, make one with new_plan() of a "
            "backend, keep it, and give its tensor to plan_paged_attention() and then to paged_attention()"
        )
    return plan


def launch_of(op: str, plan: Plan, kind: str) -> Launch:
    """Return how a plan launches layers of a kind, as of ``Backend.kernels``; NotImplementedError if it does not."""
    if kind not in plan.kernels:
        raise NotImplementedError(f"{op}: the backend of this plan has no kernels for {kind}; call another op")
    return plan.kernels[kind]


class EmptyPlan:
    """A plan that decides nothing, and has an owner; see ``Plan``. Each backend launches its own kernels."""

    kernels: Mapping[str, Launch] = MappingProxyType({})

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(16, dtype=torch.uint8, device=device)
        self.numbers = torch.zeros(0, dtype=torch.int64, device="cpu")
        own(self)

    def decide(self, batch: PlannedBatch) -> None: ...

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        raise NotImplementedError


class EmptyWorkspace:
    """An empty workspace; see ``Workspace``."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def load(self, geometry: Geometry) -> None: ...


class Unplanned:
    """The part of ``Backend`` that is about plans, where kernels read the page table as it is then."""

    schedules: tuple[int, ...] = (0,)
    kernels: Mapping[str, Launch] = MappingProxyType({})
    installation: Installation = NothingToBuild()

    def best_schedule(
        self, groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> int:
        return 0

    def workspace_bytes(
        self, groups: Sequence[Geometry], device: torch.device, captured: CapturedLaunch | None = None
    ) -> int:
        return 0

    def plan_bytes(self, groups: Sequence[Geometry], device: torch.device, tokens: int, rows: int) -> int:
        return 0

    def workspace(self, device: torch.device, nbytes: int) -> EmptyWorkspace:
        return EmptyWorkspace(device)


# ---- what backends have in common that append and decode by our kernels

OLDEST_CAPABILITY = (8, 0)
"""The compute capability from which on Triton compiles for a device, and its tensor cores multiply bfloat16."""


class TritonInstallation(NothingToBuild):
    """Triton, which brings its compiler along."""

    def problems(self, builds: bool = True) -> list[str]:
        missing = []
        try:
            importlib.import_module("triton")
        except Exception as error:  # its compiler is a library, which may not load
            missing.append(f"Triton does not import ({error}): pip install triton")
        if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < OLDEST_CAPABILITY:
            wanted, has = (".".join(map(str, version)) for version in (OLDEST_CAPABILITY, found))
            missing.append(
                f"Triton compiles for compute capability {wanted} or newer, and the device has {has}: use another GPU, "
                "or wrap with backend='reference' and mode='eager'"
            )
        return missing


class PagedKernels(Unplanned):
    """The part of ``protocol.Backend`` that does not depend on how attention is tiled."""

    kv_dtypes = SCALED_IN_KERNELS
    capturable = True
    rope_append = True  # by the kernel that decode has, too
    installation: Installation = TritonInstallation()

    def stored_head_dim(self, head_dim: int) -> int:
        from compiled_llm_ops.kernels.attention.packed_tiling import SMALLEST_HEAD

        return max(SMALLEST_HEAD, power_of_two(head_dim))

    def append(self, args: AppendPagedKv) -> None:
        from compiled_llm_ops.kernels.attention.rope_append import append

        append(args)
