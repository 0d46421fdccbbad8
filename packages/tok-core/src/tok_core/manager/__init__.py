"""The manager: decides on a CPU what every step computes, and what its tokens mean."""
