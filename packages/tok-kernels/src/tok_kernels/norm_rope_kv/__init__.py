"""RMS norm, rotary embedding, KV-cache writes, gated activation."""
