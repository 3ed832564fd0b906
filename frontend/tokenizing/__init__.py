"""What `frontend.tokenizer` is made of: backends, places where a text may be cut, and the cache of the pieces."""
