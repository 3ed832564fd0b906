"""Shared storage in buckets of S3. An extension."""
