"""Discovery through the API server of Kubernetes. An extension."""
