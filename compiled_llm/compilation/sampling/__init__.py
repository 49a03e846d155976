"""The sampling step as compiled: logit adjustments, masks, draws and log-probabilities."""
