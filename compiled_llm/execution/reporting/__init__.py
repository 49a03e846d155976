"""Reports of a model at work: statistics, progress, slower paths."""
