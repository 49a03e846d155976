"""How long steps and requests take: when the next one is launched, how much it computes, and what is told of it."""
