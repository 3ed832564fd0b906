"""KV events over NATS JetStream. An extension."""
