"""Where the time of a program goes: kernels by kind, bytes, bandwidth, the host. ``bench`` and ``explain`` share it."""
