"""Group decoding sequences by shared prefix for cascade attention."""
