"""The reference backend: plain PyTorch, which runs anywhere and needs no plan. The oracle for all others."""
