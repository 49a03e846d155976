"""HTTP: the application, its guard, and the server that reads and writes."""
