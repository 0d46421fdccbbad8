"""Implement `Backend`: in plain torch, in Triton, and in Triton with FlashInfer's attention kernels."""
