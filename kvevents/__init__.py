"""News of KV caches: engine formats, publisher, cursor (gaps, replay, snapshots), subscriber."""
