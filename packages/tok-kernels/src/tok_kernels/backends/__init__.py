"""Implement `Backend`: in plain torch, in Triton, and with attention kernels of Triton and FlashInfer mixed."""
