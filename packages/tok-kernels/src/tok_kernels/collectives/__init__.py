"""Compute collectives within kernels, through memory that the ranks of a pipeline stage share."""
