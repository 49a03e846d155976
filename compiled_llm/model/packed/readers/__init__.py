"""Readers of other libraries' weights, one file a library; none imports its library."""
