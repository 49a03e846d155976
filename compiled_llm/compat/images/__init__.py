"""Private parts of transformers that pictures need; ``huggingface.py`` has those of all models."""
