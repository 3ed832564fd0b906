"""A mesh on hosts that this machine plays itself: network namespaces with a bridge, and faults between them."""
