"""`compiled-llm doctor`: what this machine has, and what it lacks."""
