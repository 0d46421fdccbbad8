"""The resources of the API, each for both clients: their names mirror its URLs."""
