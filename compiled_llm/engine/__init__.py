"""Many requests at once on one wrapped model: their settings, their order, and the loop that runs them."""
