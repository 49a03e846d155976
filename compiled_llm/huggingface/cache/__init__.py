"""Caches of HuggingFace's kind over our pages."""
