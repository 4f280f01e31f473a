"""Links of a given rate between the ranks of one machine: a network namespace for each, joined by a bridge.

The bridge is in a namespace too, so the machine's own network stays as it is, and all goes with the namespaces. Every
rank has a veth pair to the bridge, both ends of which send at the rate: one limits what the rank sends, the other what
it receives.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from oases_hf.errors import ConfigError

DEVICE = "eth0"
"""The rank's end of its link."""

BURST_BYTES, LATENCY_MS = 2**17, 50
"""What may pass at once after a pause, and how long the rest queues before it is lost.

Below 64 KiB and headers, what a sender hands over at once, tbf cuts that into packets, on the ranks' cores: on two
cores, with a burst of 64 KiB, the kernel took 28 s where it takes 5, and schedules that overlap took 31-42 % longer.
"""

STOPPING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Links:
    """Links between ranks.

    Attributes:
        name: that the names of the namespaces begin with.
        ranks: how many there are.
    """

    name: str
    ranks: int

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those of the ranks, then the switch."""
        return (*(f"{self.name}-{rank}" for rank in range(self.ranks)), self.switch)

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` in the namespace of the rank that RANK says, on the link."""
        entering = f'exec ip netns exec {self.name}-"$RANK" "$@"'
        return ["sh", "-c", entering, "sh", "env", f"GLOO_SOCKET_IFNAME={DEVICE}", *command]


def refusal() -> str:
    """Why there can be no links here, in a sentence; empty if there can."""
    if sys.platform != "linux":
        return "rate-limited links are Linux network namespaces; run this on Linux"
    if os.geteuid() != 0:
        return "rate-limited links are network namespaces, which only root makes; run this as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found; install iproute2" if missing else ""


@contextmanager
def links(ranks: int, mbit_per_s: int) -> Iterator[Links]:
    """Link ``ranks`` ranks at a rate; nothing is left of that afterwards, whatever happens inside.

    Raises:
        ConfigError: this machine cannot; says why.
    """
    if why := refusal():
        raise ConfigError(why)
    made = Links(f"oases{os.getpid()}", ranks)
    try:
        _make(made, mbit_per_s)
        yield made
    finally:
        _remove(made)


def _make(made: Links, mbit_per_s: int) -> None:
    for namespace in made.namespaces:
        _call("ip", "netns", "add", namespace)
    _call("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", made.switch, "link", "set", "bridge", "up")
    for rank in range(made.ranks):
        port, namespace = f"rank{rank}", made.namespaces[rank]
        pair = ("type", "veth", "peer", "name", DEVICE, "netns", namespace)
        _call("ip", "-n", made.switch, "link", "add", port, *pair)
        _call("ip", "-n", namespace, "address", "add", f"10.0.0.{rank + 1}/24", "dev", DEVICE)
        for there, device in ((made.switch, port), (namespace, DEVICE)):
            limit = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", str(BURST_BYTES), "latency", f"{LATENCY_MS}ms")
            _call("tc", "-n", there, "qdisc", "add", "dev", device, "root", *limit)
        _call("ip", "-n", made.switch, "link", "set", port, "master", "bridge", "up")
        for device in (DEVICE, "lo"):
            _call("ip", "-n", namespace, "link", "set", device, "up")


def _remove(made: Links) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        there = {line.split()[0] for line in _call("ip", "netns", "list").splitlines()}
        for namespace in there.intersection(made.namespaces):
            _call("ip", "netns", "delete", namespace)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(*words: str) -> str:
    """Run a command and return what it prints; Ctrl-C on a terminal does not reach it."""
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        why, _, _ = done.stderr.strip().partition("\n")
        raise ConfigError(f"{' '.join(words)}: {why}; are network namespaces allowed here?")
    return done.stdout
