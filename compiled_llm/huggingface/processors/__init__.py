"""HuggingFace's logits processors, as steps of ours."""
