"""Regional tracing: one decoder layer is traced, the others follow it."""
