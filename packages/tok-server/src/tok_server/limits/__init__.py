"""How much of anything the server takes, and for how long."""
