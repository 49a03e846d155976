"""Endpoints of typed questions: a part that can be taken out."""
