"""Vectors and scores of prompts, in place of answers: embeddings, and the heads of classifiers."""
