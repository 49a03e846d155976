"""PyTorch's own kernel for packed queries behind our ops: ``torch.nn.attention.varlen``, from torch 2.13 on."""

# Read from torch 2.13's Python and its C++ sources, and never run by us on a GPU: a CPU has no kernel for it.
