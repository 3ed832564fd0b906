"""Keep a worker in front of each server that runs already. A part of the extension attach."""
