"""Memory of the device and of the host that steps read and write."""
