"""Say how long tests wait for what must come.

A test that passes never waits this long. A shorter limit would fail whenever a shared machine stands still for some
seconds. A test of a promised speed measures the time itself, and tells a slow machine apart from a broken promise.
"""

PATIENCE_S = 60.0
