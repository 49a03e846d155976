"""Matrix products with few rows, and the norms around them."""
