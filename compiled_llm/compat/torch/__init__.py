"""Private parts of torch. The table in ``compat`` names them, with the condition that ends each."""
