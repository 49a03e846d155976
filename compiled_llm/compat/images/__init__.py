"""Private parts of transformers that images need; ``huggingface.py`` has those of all models."""
