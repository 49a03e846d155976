"""Fields that requests of several endpoints have."""
