"""Attention over blocks of keys that a sparse matrix of blocks allows, without pages."""
