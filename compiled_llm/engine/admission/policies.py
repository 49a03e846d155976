"""The policies of admission that an engine knows by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from compiled_llm.engine.admission.cheaper import Cheaper
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.peak import Peak
from compiled_llm.engine.admission.state import Admission

AdmissionName = Literal["auto", "peak", "greedy"]

POLICIES: dict[str, Callable[[], Admission]] = {"auto": Cheaper, "peak": Peak, "greedy": Greedy}


def policy_of(admission: AdmissionName) -> Admission:
    """Return a policy by its name."""
    return POLICIES[admission]()
