"""Rewrites of compiled graphs: what Dynamo traced becomes our ops."""
