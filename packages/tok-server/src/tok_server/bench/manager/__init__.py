"""`tok bench manager`: measure the CPU cost of the manager's steps without a GPU."""
