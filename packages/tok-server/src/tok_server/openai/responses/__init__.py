"""/v1/responses: a conversation in items, answered in items. What is asked becomes a chat, and is computed as one."""
