"""One version of the model: what it is, compared with what it was."""
