"""Values that all parts of the mesh share: ids, hashing, messages, errors. Does no I/O."""
