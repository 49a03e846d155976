"""One call of `generate`, read and judged: can the fast loop answer it?"""
