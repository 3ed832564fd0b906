"""The files that `kvmesh profile plan` writes: a compose override, values for the Helm chart, the planner's settings.

Everything here is pure: a `Deployment` goes in, text comes out.
"""
