"""HuggingFace's cache classes over our pages."""
