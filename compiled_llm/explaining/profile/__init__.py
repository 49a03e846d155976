"""Where the time of a program goes: kernels by kind, and the host."""
