"""Stop conditions of samples: stop tokens, stop strings, length limits."""
