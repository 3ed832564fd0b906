"""OpenAI's chat completions, text completions, embeddings and models."""
