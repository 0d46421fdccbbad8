"""Collectives within kernels, through memory that the ranks of a stage share."""
