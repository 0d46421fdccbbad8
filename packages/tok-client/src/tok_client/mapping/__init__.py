"""Answers for millions of prompts: a window of requests over any iterable, with a file that can be gone on with."""
