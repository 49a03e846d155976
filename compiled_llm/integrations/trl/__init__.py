"""TRL: its trainers sample by an engine of the model that they train."""
