"""What a HuggingFace model looks like, and whether it can run here."""
