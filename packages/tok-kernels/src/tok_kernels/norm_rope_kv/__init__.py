"""Compute RMS norm, rotary embedding, gated activation, and writes to the KV cache."""
