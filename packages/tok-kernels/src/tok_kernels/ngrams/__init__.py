"""Predict the next tokens of sequences by n-gram lookup, and accept drafted tokens, on the device."""
