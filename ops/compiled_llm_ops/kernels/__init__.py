"""Our Triton kernels, and the rules that choose their tilings."""
