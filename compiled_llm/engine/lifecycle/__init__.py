"""Events of all engines of a model: sleep, new weights, a changed model, a lost device."""
