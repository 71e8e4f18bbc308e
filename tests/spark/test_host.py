"""What a task finds out about its machine."""

from __future__ import annotations

import ipaddress

from hvd_cluster.spark import host
from hvd_cluster.spark.classic import ClassicSession


def test_names_that_do_not_resolve_are_left_out_and_loopback_comes_last() -> None:
    found = host.addresses(["127.0.0.1", "no-such-host.invalid", "192.0.2.7"], ["no-such-host.invalid"])
    assert found[0] == "192.0.2.7"
    assert "127.0.0.1" in found
    kinds = [ipaddress.ip_address(address).is_loopback for address in found]
    assert kinds == sorted(kinds)


def test_there_is_always_an_address() -> None:
    assert host.addresses()


def test_the_interface_towards_this_host_is_loopback() -> None:
    assert "127.0.0.1" in host.addresses(towards=["127.0.0.1"])


def test_ipv6_addresses_of_sparks_settings_lose_their_brackets() -> None:
    class OnIpv6(ClassicSession):
        def conf(self, name: str) -> str | None:
            return {"spark.driver.bindAddress": "[::]", "spark.driver.host": "[::1]"}.get(name)

    bind, hosts = OnIpv6(None).driver_hosts()
    assert bind == "::"
    assert "::1" in hosts
