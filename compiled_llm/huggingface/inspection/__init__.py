"""What is read of a model, its generation config and its overrides before a call, and remembered."""
