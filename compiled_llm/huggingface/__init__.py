"""The wrapped model: HuggingFace's `generate` and `forward` over our rows."""
