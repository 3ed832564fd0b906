"""OpenAI's Responses API, stateless: every request brings its whole conversation, and nothing is kept."""
