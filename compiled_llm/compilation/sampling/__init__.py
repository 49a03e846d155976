"""The sampling step as compiled: logit adjustments, masks and draws."""
