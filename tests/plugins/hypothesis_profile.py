"""The settings of hypothesis for all tests: no limit on time, since other work may share the machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("hvd_cluster", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hvd_cluster")
