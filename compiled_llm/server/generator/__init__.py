"""The generator's process. Files that need torch are imported once a model is loaded: it answers clients before."""
