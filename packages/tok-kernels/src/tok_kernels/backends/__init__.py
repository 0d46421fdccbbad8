"""Backends: the reference in torch, Triton kernels, and kernels of mixed origin."""
