"""How many workers of which role: not built yet. docs/architecture.md, "Tree", says what belongs here."""
