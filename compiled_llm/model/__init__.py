"""The structure of a HuggingFace model, and checks that it can run here."""
