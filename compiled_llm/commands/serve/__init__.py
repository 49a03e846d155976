"""`compiled-llm serve`: a server's processes, and the options that they take."""
