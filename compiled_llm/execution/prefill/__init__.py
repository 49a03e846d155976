"""Prefill steps: prompts packed into one launch, in sizes that CUDA graphs have."""
