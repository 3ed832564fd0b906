"""Clients of other projects, unchanged, against a real mesh."""
