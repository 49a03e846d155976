"""Steps that feed in guesses: the texts that they are looked up in, who makes them, and how many pay."""
