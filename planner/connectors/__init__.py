"""Start and stop workers: one module for each kind of connector. kinds.py lists them, connector.py is the seam."""
