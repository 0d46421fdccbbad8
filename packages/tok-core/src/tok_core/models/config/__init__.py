"""What a model directory says of itself: config.json and generation_config.json, read and checked."""
