"""The fault machine: a real mesh of processes under seeded faults, and an oracle that knows every right token."""
