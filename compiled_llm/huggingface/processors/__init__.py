"""HuggingFace's logits processors in our loops."""
