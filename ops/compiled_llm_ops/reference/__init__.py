"""The reference backend: plain PyTorch, which runs anywhere and is planned by nobody. The oracle for all others."""
