"""Pictures in prompts of an engine."""
