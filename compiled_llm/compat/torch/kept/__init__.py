"""What programs that are kept, and run without their graphs, take of torch."""
