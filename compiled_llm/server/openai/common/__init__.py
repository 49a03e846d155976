"""Shared by the endpoints: errors, events, answers on their way."""
