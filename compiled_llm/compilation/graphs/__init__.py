"""CUDA graphs of whole steps: captured, replayed, and checked against the model before each replay."""
