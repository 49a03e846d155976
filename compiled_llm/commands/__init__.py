"""What a user runs: `compiled-llm generate`, `chat`, `explain`, `serve`, `client`, `doctor` and `bench`."""
