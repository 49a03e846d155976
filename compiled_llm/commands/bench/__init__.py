"""``compiled-llm bench``: this model here, next to plain HuggingFace; and load on any server of OpenAI's API.

Nothing else in the package imports this; ``tools/bench`` of a checkout does, for the published runs.
"""
