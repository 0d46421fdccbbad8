"""Read generated text: reasoning, content, tool calls, answers to compare."""
