"""Workloads run on an engine or against a server, and what they show."""
