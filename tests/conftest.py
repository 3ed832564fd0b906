"""For all tests: what a property takes is no part of it, and an example that fails can be tried again."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvmesh", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvmesh")
