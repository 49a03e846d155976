"""What keeps a program from one graph: graph breaks, recompiles, and nodes that no CUDA graph may contain."""
