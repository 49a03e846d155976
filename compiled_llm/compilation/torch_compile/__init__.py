"""Around ``torch.compile``: its errors, compiling without running, and noticing that Inductor compiles."""
