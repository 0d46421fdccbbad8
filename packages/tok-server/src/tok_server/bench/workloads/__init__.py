"""Run workloads on an engine or against a server and report the results."""
