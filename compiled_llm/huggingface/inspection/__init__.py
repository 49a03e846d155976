"""Properties of a model, its generation config and its overrides that are read before a call, and remembered."""
