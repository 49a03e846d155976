"""``compiled-llm bench``: the instrument that speed is judged by.

Nothing else in the package imports this.
"""
