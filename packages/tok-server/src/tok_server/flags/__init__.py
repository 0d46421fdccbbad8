"""Flags of the commands, and what they become."""
