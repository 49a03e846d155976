"""A kernel of block-sparse attention, and its tiling."""
