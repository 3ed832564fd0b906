"""Who makes workers come and go: one module per kind behind the seam in planner/connectors/connector.py."""
