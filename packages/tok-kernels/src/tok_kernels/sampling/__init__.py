"""Sample tokens: penalties, masks, temperature, filters, draws keyed by seed and position."""
