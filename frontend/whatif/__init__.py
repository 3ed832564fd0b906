"""Answer questions about other fleets, by a process beside the frontend that gets its recent requests."""
