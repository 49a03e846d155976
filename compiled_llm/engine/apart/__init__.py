"""Work in a process of its own: each task in a fork with limits, which a crash ends alone."""
