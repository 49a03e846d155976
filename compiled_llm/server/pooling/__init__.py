"""Endpoints of what a model makes of whole texts: embeddings, ranks and labels."""
