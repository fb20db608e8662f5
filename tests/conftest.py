"""Settings of all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A busy machine is no failure, and nothing here is about time.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("patient")

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that. The tests
# that interrupt some need it as users have it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
