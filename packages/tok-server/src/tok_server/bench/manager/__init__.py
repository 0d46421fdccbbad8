"""`tok bench manager`: what a step costs the manager, without a GPU."""
