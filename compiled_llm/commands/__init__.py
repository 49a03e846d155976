"""The commands: `compiled-llm generate`, `chat`, `explain`, `compile`, `serve`, `client`, `doctor` and `bench`."""
