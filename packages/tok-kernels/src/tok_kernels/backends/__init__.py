"""Implementations of `Backend`: the reference in torch, Triton, and a mix of Triton's and FlashInfer's kernels."""
