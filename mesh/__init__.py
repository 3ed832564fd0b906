"""Running a service: discovery, request plane, settings, lifecycle, telemetry. Knows no tokens, no GPUs."""
