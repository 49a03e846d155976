"""Replicas on Ray Serve: several engine processes behind API servers. Only ``ray_*`` files import Ray."""
