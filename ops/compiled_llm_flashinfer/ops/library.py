"""The ``compiled_llm_flashinfer`` namespace, in which these ops are defined."""

from torch.library import Library

# Ops vanish with their Library object, so it lives as long as the module.
LIBRARY = Library("compiled_llm_flashinfer", "DEF")
