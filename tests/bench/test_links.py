"""Links between namespaces: what they are, that they hold to their rate, and that nothing is left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from oases_hf.errors import ConfigError
from scripts.bench import links as module
from scripts.bench.links import BURST_BYTES, DEVICE, Links, links, refusal

on_links = pytest.mark.skipif(bool(refusal()), reason=refusal() or "there can be links here")

RECEIVE = """
import socket
with socket.create_server(("10.0.0.1", 9999)) as server:
    print("listening", flush=True)
    taken, _ = server.accept()
    while taken.recv(1 << 16):
        pass
"""
SEND = """
import socket
with socket.create_connection(("10.0.0.1", 9999), timeout=20) as sender:
    sender.sendall(bytes({size}))
    sender.shutdown(socket.SHUT_WR)
    sender.recv(1)
"""


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def network() -> tuple[str, str]:
    """The namespaces, and the devices of the machine's own."""
    return output("ip", "netns", "list"), output("ip", "-br", "link")


@pytest.fixture
def clean() -> Iterator[None]:
    before = network()
    yield
    assert network() == before


@on_links
@pytest.mark.usefixtures("clean")
def test_every_rank_has_a_namespace_with_a_rate_in_both_directions() -> None:
    devices = network()[1]
    with links(3, 40) as made:
        assert set(made.namespaces) <= {line.split()[0] for line in network()[0].splitlines()}
        assert network()[1] == devices
        ends = [(namespace, DEVICE) for namespace in made.namespaces[:3]]
        ends += [(made.switch, f"rank{rank}") for rank in range(3)]
        for namespace, device in ends:
            assert "tbf 8" in (said := output("tc", "-n", namespace, "qdisc", "show", "dev", device))
            assert "rate 40Mbit" in said


@on_links
@pytest.mark.usefixtures("clean")
def test_bytes_are_no_faster_than_the_rate() -> None:
    size, mbit_per_s = 1 << 20, 20
    with links(2, mbit_per_s) as made:
        receiver = subprocess.Popen(
            made.command([sys.executable, "-c", RECEIVE]), env={**os.environ, "RANK": "0"}, stdout=subprocess.PIPE
        )
        assert receiver.stdout is not None
        receiver.stdout.readline()
        began = time.monotonic()
        sender = made.command([sys.executable, "-c", SEND.format(size=size)])
        subprocess.run(sender, env={**os.environ, "RANK": "1"}, check=True, timeout=30)
        assert time.monotonic() - began > (size - 2 * BURST_BYTES) * 8 / (mbit_per_s * 1e6)
        receiver.stdout.close()
        assert receiver.wait(10) == 0


@on_links
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), links(2, 40):
        raise error


@on_links
@pytest.mark.usefixtures("clean")
def test_nothing_is_left_of_what_could_not_be_made() -> None:
    with pytest.raises(ConfigError, match=r"^tc .* rate 0mbit .*mandatory.; are network"), links(2, 0):
        raise AssertionError("no link has this rate")


def test_ranks_find_their_namespace_by_their_number() -> None:
    made = Links("some", 2)
    assert made.namespaces == ("some-0", "some-1", "some-switch")
    shell, option, entering, *rest = made.command(["echo", "a b"])
    said = subprocess.run(
        [shell, option, entering.replace("exec ip", "printf '%s\\n'"), *rest],
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split("\n")[2:] == ["some-1", "env", f"GLOO_SOCKET_IFNAME={DEVICE}", "echo", "a b", ""]


@pytest.mark.parametrize(
    ("thing", "name", "value", "said"),
    [
        (sys, "platform", "darwin", "run this on Linux"),
        (os, "geteuid", lambda: 1000, "run this as root"),
        (shutil, "which", lambda tool: None, "ip and tc not found; install iproute2"),
    ],
)
def test_elsewhere_it_is_refused(
    thing: object, name: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(thing, name, value)
    monkeypatch.setattr(module, "_make", lambda *_: pytest.fail("made links"))
    with pytest.raises(ConfigError, match=said), links(2, 40):
        pass
