"""What a user runs: `compiled-llm generate`, `explain`, `serve`, `client`, `doctor` and `bench`."""
