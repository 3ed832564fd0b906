"""Engines behind one seam, and the host that makes a worker of one: prefill, decode or aggregated."""
