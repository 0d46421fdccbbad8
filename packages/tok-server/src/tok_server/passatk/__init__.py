"""pass@k: the probability that at least one of k samples solves a problem, estimated over a file of problems."""
