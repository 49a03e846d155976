"""The engine process: the model behind a Unix socket. It answers clients while the model is still being loaded."""
