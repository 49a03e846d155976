"""Finds out by a small run how a model attends, masks and counts positions."""
