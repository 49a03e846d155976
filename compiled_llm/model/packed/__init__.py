"""Linear layers with weights of 4 or 8 bits that another library has made, multiplied by an op of ours in programs."""
