"""What a user sees of a model at work: statistics, progress, slower paths."""
