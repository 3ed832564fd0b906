"""How long tests wait for what must come.

A test that passes never waits this long; one that waits less fails when a shared machine stands still for some seconds.
What is promised to come soon is measured beside it, and told apart from a machine that was slow.
"""

PATIENCE_S = 60.0
