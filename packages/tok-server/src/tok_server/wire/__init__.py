"""JSON over HTTP: bodies, fields, errors, and how answers are written."""
