"""Run work that a request can make expensive in child processes, which a limit of time or memory kills."""
