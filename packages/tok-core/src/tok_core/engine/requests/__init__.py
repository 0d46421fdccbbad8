"""State of one request: streamed, unstreamed or embedded, and the parts of it that replicas compute."""
