"""`tok bench server`: measure the HTTP server and the manager over a simulated worker."""
