"""Log-probabilities as endpoints write them: a part that can be taken out."""
