"""Unit tier, no ranks: the transport inside one process."""

from __future__ import annotations

import threading

import pytest

from dte_dist import ChannelClosed, LoopbackTransport, Payload, PeerLost, VersionGap


def test_history_and_timeout_are_checked() -> None:
    with pytest.raises(ValueError, match="history"):
        LoopbackTransport(history=0)
    for wrong in (0, -1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match="timeout"):
            LoopbackTransport().receive(1, timeout=wrong)  # type: ignore[arg-type]


def test_a_version_sent_again_replaces_the_one_kept() -> None:
    transport = LoopbackTransport()
    for lineage in (1, 2):
        transport.send(Payload(5, -1, True, {}, lineage), timeout=1.0)
    assert transport.receive(5, timeout=1.0).lineage == 2


def test_loopback_waits_drops_and_closes() -> None:
    transport = LoopbackTransport(history=2)
    with pytest.raises(PeerLost, match="in time"):
        transport.receive(1, timeout=0.01)
    sender = threading.Timer(0.05, lambda: transport.send(Payload(1, -1, True, {}), timeout=1.0))
    sender.start()
    assert transport.receive(1, timeout=20.0).version == 1
    sender.join()
    for version in (2, 3):
        transport.send(Payload(version, -1, True, {}), timeout=1.0)
    with pytest.raises(VersionGap, match="not kept"):
        transport.receive(1, timeout=1.0)
    closer = threading.Timer(0.05, transport.close)
    closer.start()
    with pytest.raises(ChannelClosed):
        transport.receive(4, timeout=20.0)
    closer.join()
    transport.close()
    with pytest.raises(ChannelClosed):
        transport.send(Payload(4, -1, True, {}), timeout=1.0)


def test_each_sender_has_its_own_payloads() -> None:
    transport = LoopbackTransport(history=2)
    for version in (1, 2, 3):
        transport.send(Payload(version, -1, True, {}, sender=5), timeout=1.0)
    transport.send(Payload(1, -1, True, {}, 9), timeout=1.0)
    assert transport.receive(1, timeout=1.0).lineage == 9
    assert transport.receive(3, sender=5, timeout=1.0).sender == 5
    with pytest.raises(VersionGap, match="ranks 5"):
        transport.receive(1, sender=5, timeout=1.0)
    with pytest.raises(PeerLost, match="ranks 0"):
        transport.receive(3, timeout=0.01)
    with pytest.raises(PeerLost, match="got nothing"):
        transport.receive(3, sender=2, timeout=0.01)
