"""Images in prompts of an engine."""
