"""pass@k: how likely it is that one of k samples solves a problem, over a file of problems."""
