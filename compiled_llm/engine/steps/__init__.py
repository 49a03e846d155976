"""The steps of an engine: the scheduler, and the loop that launches and reads them."""
