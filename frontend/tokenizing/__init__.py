"""Parts of `kvmesh.frontend.tokenizer`: backends, places where a text may be cut, and the cache of the pieces."""
