"""Metrics and dashboards: docs/metrics.md, Grafana's JSON, and the check of both against a running mesh."""
