"""Run the lines of batches through the engine, each answered once."""
