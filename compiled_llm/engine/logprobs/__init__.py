"""Log-probabilities of tokens and of prompts: a part that can be taken out."""
