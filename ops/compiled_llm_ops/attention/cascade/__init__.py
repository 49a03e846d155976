"""Cascade attention: pages that several rows begin with are read once for all of them."""
