"""The model on its device: made, prepared, watched and made again."""
