"""Checks of programs: where a graph breaks, why one recompiles, and which nodes no CUDA graph can capture."""
