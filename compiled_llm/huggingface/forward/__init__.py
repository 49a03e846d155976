"""The model's own `forward`, over our pages."""
