"""Replicas on Ray Serve: several generators behind fronts, and who answers what. Only ``ray_*`` files import Ray."""
