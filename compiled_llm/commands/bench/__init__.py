"""``compiled-llm bench``: this model here, next to plain HuggingFace; and load on any server of OpenAI's API."""
