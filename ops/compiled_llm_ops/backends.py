"""The one door to the backends, each a folder beside this page: nothing else imports from those."""

from __future__ import annotations

from compiled_llm_ops.protocol import Backend

BACKENDS = ("flashinfer", "reference")
"""Their names."""


def backend_named(name: str) -> Backend:
    """Return a backend; what it needs beyond torch is not imported yet.

    Raises:
        ValueError: there is none of this name.
    """
    if name == "flashinfer":
        from compiled_llm_ops.flashinfer import backend as flashinfer

        return flashinfer.BACKEND
    if name == "reference":
        from compiled_llm_ops.reference import backend as reference

        return reference.BACKEND
    raise ValueError(f"backend {name!r} does not exist; choose one of {', '.join(map(repr, BACKENDS))}")
