"""Kinds of layers: what works with each, and the sentence of each refusal."""
