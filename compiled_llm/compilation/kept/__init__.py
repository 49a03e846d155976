"""Programs that are taken as they were kept, without a trace."""
