"""`tok batch`: a file of requests answered without a server, resumable at any moment."""
