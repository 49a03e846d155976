"""What a user runs: `compiled-llm generate`, `explain`, `doctor` and `bench`."""
