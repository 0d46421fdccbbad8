"""Chat completions: messages, tools, requests, answers."""
