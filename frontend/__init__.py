"""OpenAI API in, tokens out: HTTP, chat templates, tokenizing, streaming."""
