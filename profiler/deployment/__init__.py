"""The files that `kvmesh profile plan` writes: a compose override, Kubernetes manifests, the planner's settings.

Everything here is pure: a `Deployment` goes in, text comes out.
"""
