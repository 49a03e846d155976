"""Answers that follow a grammar: what grammars are made of, how they are compiled, and what they allow next."""
