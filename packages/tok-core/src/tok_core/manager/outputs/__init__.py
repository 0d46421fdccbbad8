"""Process the outputs of steps: sample progress, stops, prompt log-probabilities, embeddings."""
