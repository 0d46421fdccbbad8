"""Sampling as Triton kernels."""
