"""Access to the backends, each a folder next to this file: no other module imports from those."""

from __future__ import annotations

from compiled_llm_ops.protocol import Backend

BACKENDS = ("flashinfer", "reference")
"""Their names."""


def backend_named(name: str) -> Backend:
    """Return a backend, without importing what it needs beyond torch; ValueError if there is none of this name."""
    if name == "flashinfer":
        from compiled_llm_ops.flashinfer import backend as flashinfer

        return flashinfer.BACKEND
    if name == "reference":
        from compiled_llm_ops.reference import backend as reference

        return reference.BACKEND
    raise ValueError(f"backend {name!r} does not exist; choose one of {', '.join(map(repr, BACKENDS))}")
