"""Send calls over HTTP: one session, retries, streams, and blocking use of all that."""
