"""What requests get besides tokens: log-probabilities and hidden states, read with a step's tokens."""
