"""`compiled-llm doctor`: what this machine has, what it lacks, and a trial of what it can do."""
