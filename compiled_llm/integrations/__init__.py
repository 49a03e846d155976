"""Other people's tools over our engine: lm-eval, TRL."""

# Each is in a folder of its own, which imports the tool only when it is used.
