"""Steps of one shape, ready to run: which runs for the one that is wanted, its program or CUDA graph, its buffers."""
