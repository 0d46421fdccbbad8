"""The OpenAI API: completions, chats, responses, embeddings, models."""
