"""`tok bench server`: what a request costs the HTTP server, without an engine."""
