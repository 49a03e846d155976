"""TRL's trainers over an engine: ``from compiled_llm.trl import sample_with``."""

from compiled_llm.integrations.trl.sample_with import sample_with

__all__ = ["sample_with"]
