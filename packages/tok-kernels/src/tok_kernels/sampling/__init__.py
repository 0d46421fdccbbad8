"""Sample tokens: penalties, masks, temperature, filters, and random numbers keyed by seed and position."""
