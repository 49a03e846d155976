"""From a forward to programs: traced, rewritten, compiled, captured, checked."""
