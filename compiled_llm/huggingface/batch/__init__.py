"""HuggingFace's `generate_batch`, and calls of `generate` that join an engine's batch."""
