"""Policies of admission: whether the next request that waits begins to run. Host facts alone, and no requests."""
