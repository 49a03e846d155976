"""Admission of whatever fits now."""

from __future__ import annotations

from compiled_llm.engine.admission.state import AdmissionState


class Greedy:
    """A policy by which a request begins as soon as its text fits, as in vLLM; others may have to begin again."""

    def plan(self, state: AdmissionState) -> bool:
        return True
