"""Discovery in etcd, with users and their rights. An extension."""
