"""Typed questions about a state, answered by the log-probabilities of labels: a part that can be taken out."""
