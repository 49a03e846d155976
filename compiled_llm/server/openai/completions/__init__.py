"""`/v1/completions`."""
