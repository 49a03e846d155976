"""When the next step is launched, and how long requests have waited."""
