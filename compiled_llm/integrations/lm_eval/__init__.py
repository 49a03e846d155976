"""lm-eval: a model of its registry whose requests an engine answers."""
