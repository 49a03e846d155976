"""A model and its tokenizer, from whatever names them."""
