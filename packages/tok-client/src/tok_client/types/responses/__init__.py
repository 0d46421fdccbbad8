"""The Responses API: input items, answers, events."""
