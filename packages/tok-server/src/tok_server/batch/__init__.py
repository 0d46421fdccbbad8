"""Batches that survive anything: files of requests, answered line by line, kept in SQLite until all are."""
