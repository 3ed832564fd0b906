"""Choose where a request runs, by what workers hold in their KV caches and how busy they are."""
