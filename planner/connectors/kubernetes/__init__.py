"""The planner scales workloads of Kubernetes. A part of the extension kubernetes."""
