"""How a client and its engine process exchange messages over a socket."""
