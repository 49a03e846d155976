"""`compiled-llm generate`: one prompt, and its answer."""
