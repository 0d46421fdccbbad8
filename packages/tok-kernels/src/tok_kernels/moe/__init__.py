"""Compute mixtures of experts: choose each token's experts, multiply by their matrices, add the weighted results."""
