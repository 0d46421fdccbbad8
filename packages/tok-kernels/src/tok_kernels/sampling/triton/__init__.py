"""Sample tokens by Triton kernels."""
