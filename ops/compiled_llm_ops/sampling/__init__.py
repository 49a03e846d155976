"""From logits to each row's token, and what its log-probability was."""
