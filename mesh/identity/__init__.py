"""Name the members of a mesh by their certificates, and say what each may do (docs/security.md)."""
