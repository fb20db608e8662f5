"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no failure, and nothing here is about time.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("patient")
