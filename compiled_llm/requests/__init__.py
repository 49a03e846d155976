"""Settings, outputs and text of a request, shared by engine, client and server. Imports no torch."""
