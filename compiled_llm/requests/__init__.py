"""What an engine, a client and a server share of a request: settings, outputs, text. Imports no torch."""
