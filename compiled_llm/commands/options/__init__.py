"""The options that several commands have, and the checks of their values."""
