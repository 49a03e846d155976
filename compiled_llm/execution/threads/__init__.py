"""Which thread runs a step, whose loop runs, and when Ctrl-C may interrupt it."""
