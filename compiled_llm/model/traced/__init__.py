"""What programs are traced from: copies of a model, with modules and hooks in them that it does not have."""
