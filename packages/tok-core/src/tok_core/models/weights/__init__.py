"""Weights of a model: found, loaded, sharded, or made up."""
