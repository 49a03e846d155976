"""Classifiers, whose heads score a whole text."""
