"""Compile and follow strangers' grammars in worker processes with limits."""
