"""Decode steps: the batch that stays on the device, and its sampling."""
