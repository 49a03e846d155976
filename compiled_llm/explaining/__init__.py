"""``explain``: why a model does not run as one graph, line by line, and what to do about it."""

from __future__ import annotations

from compiled_llm.explaining.explainer import explain
from compiled_llm.explaining.report import Report

__all__ = ["Report", "explain"]
