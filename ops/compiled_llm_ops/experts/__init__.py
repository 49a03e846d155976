"""Ops of mixtures of experts: each row is multiplied with the weights of the experts that it chose, and no others."""
