"""The registry of backends: those in folders next to this file, and those that other packages bring."""

# A package registers a backend by an entry point of the group ``compiled_llm_ops.backends``, whose object answers
# ``protocol.Backend``. It is imported only once its name is asked for.

from __future__ import annotations

import functools
import importlib
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from compiled_llm_ops.protocol import Backend, DecodeOps, own_decode_ops

logger = logging.getLogger("compiled_llm.graphs")

BACKENDS = {
    "flashinfer": "compiled_llm_ops.flashinfer.backend",
    "triton": "compiled_llm_ops.triton.backend",
    "flash-attn": "compiled_llm_ops.varlen.flash_attn.backend",
    "torch": "compiled_llm_ops.varlen.torch.backend",
    "reference": "compiled_llm_ops.reference.backend",
}
"""Our own, by name, each a module with ``BACKEND``, that imports only torch."""

INVARIANT = "invariant"
"""The one that ``wrap(batch_invariant=True)`` takes; it is not chosen by its name, since matmuls belong to it."""

GROUP = "compiled_llm_ops.backends"


class ChosenBackend(NamedTuple):
    """The backend whose kernels attend over the pages of a model.

    Attributes:
        name: of ``backend``.
        backend: attends in prefill, and in decode if that is planned.
        decode_ops: those that attend in decode; None if decode steps are planned.
    """

    name: str
    backend: Backend
    decode_ops: DecodeOps | None

    @property
    def decodes_by_our_own(self) -> bool:
        """Whether decode has our own ops: then all kinds of layers have some."""
        return self.decode_ops == own_decode_ops()

    def plans(self, kind: str) -> bool:
        """Whether layers of a kind, as of ``Backend.kernels``, are planned; else our own kernels attend, if any."""
        return self.decode_ops is None and kind in self.backend.kernels


def backend_for(name: str, device: str, builds: bool = True) -> ChosenBackend:
    """Return whose kernels attend on a kind of device, ``"cpu"`` or ``"cuda"``.

    With ``"auto"``, CUDA has FlashInfer for prefill and our own kernel for decode, and a CPU the reference. Where
    FlashInfer is missing or cannot be built, ``"triton"`` takes its place, and the log says so once. Any other name is
    that of a backend, which says itself how decode steps attend.

    Args:
        name: of a backend, or ``"auto"``.
        device: its kind.
        builds: whether FlashInfer's kernels have to be built, if they did not come so.

    Raises: as ``backend_named``.
    """
    if name == "auto" and device == "cuda":
        name = _fastest_that_runs(builds)
        return ChosenBackend(name, backend_named(name), own_decode_ops())
    name = "reference" if name == "auto" else name
    backend = backend_named(name)
    return ChosenBackend(name, backend, backend.decode_ops(device))


@functools.cache
def _fastest_that_runs(builds: bool) -> str:
    """Return the backend of ``"auto"`` on CUDA: once for a process, since its calls are to have the same kernels."""
    # If neither can run it is FlashInfer, whose problems are then said.
    problems = backend_named("flashinfer").installation.problems(builds)
    if not problems or backend_named("triton").installation.problems(builds):
        return "flashinfer"
    logger.warning(
        "compiled_llm: backend='auto' prefills with our own kernels (backend='triton'), not FlashInfer's: %s",
        "; ".join(problems),
    )
    return "triton"


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, ours first, without importing any."""
    others = {entry.name for entry in entry_points(group=GROUP)} - {*BACKENDS, "auto"}
    return *BACKENDS, *sorted(others)


@functools.cache
def backend_named(name: str) -> Backend:
    """Return a backend; ours import only torch.

    Raises:
        ValueError: there is none of this name, or several packages bring one.
        RuntimeError: the package that brings it cannot be imported, or its object is no backend.
    """
    if name == INVARIANT or name in BACKENDS:
        module = "compiled_llm_ops.triton.invariant" if name == INVARIANT else BACKENDS[name]
        own: Backend = importlib.import_module(module).BACKEND
        return own
    match list(dict.fromkeys(entry_points(group=GROUP, name=name))):
        case []:
            raise ValueError(f"backend {name!r} does not exist; choose one of {', '.join(map(repr, backend_names()))}")
        case [entry]:
            return _loaded(entry)
        case several:
            raise ValueError(
                f"backend {name!r} comes from {' and '.join(map(_origin, several))}; uninstall all but one"
            )


def _loaded(entry: EntryPoint) -> Backend:
    try:
        found: Any = entry.load()
    except Exception as error:
        raise RuntimeError(f"backend {entry.name!r} of {_origin(entry)} cannot be imported: {error}") from error
    if missing := [part for part in _parts_of_a_backend() if not hasattr(found, part)]:
        raise RuntimeError(
            f"backend {entry.name!r} of {_origin(entry)} is {type(found).__name__}, which lacks {', '.join(missing)}; "
            "see compiled_llm_ops.protocol.Backend"
        )
    backend: Backend = found
    return backend


def _parts_of_a_backend() -> list[str]:
    return [name for name in (*Backend.__annotations__, *vars(Backend)) if not name.startswith("_")]


def _origin(entry: EntryPoint) -> str:
    return f"{entry.value} ({'an unknown package' if entry.dist is None else entry.dist.name})"
