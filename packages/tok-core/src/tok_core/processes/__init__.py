"""Entry points of manager and worker processes, the sockets between them, and the check that they live."""
