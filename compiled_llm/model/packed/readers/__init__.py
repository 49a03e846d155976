"""Readers of other libraries' weights, one file a library; none imports its library.

Each has ``read``, which takes a module by its class and the tensors it owns, and ``PLAIN``: the classes whose
``forward`` is known to be the product alone. What is read of any other module stays with its library.
"""
