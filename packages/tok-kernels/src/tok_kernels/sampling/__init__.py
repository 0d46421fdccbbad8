"""Sample tokens: masks, penalties, biases, temperature, filters, and random numbers keyed by row."""
