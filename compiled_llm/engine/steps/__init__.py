"""What an engine runs: the scheduler, and the loop that launches and reads steps."""
