"""The thread of steps, the lock of loops, and Ctrl-C."""
