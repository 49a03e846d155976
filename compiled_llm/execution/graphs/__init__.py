"""Which CUDA graphs a model has, needs and may still replay."""
