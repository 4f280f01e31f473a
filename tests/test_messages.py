"""Sizes of messages: which one is best, and what a tensor is cut into."""

from __future__ import annotations

import pytest

from oases_hf.messages import best_message_bytes, message_count, message_elements, message_ms

MIB = 2**20


def measured(gb_per_s: dict[int, float]) -> list[tuple[int, float]]:
    """Times of messages of so many MiB."""
    return [(mib * MIB, mib * MIB / rate / 1e6) for mib, rate in gb_per_s.items()]


@pytest.mark.parametrize(
    ("gb_per_s", "best"),
    [
        ({4: 20, 8: 26, 16: 29, 32: 24, 64: 24}, 16),  # as GPUs without peer-to-peer copies
        ({4: 20, 8: 26, 16: 29, 32: 30, 64: 31}, None),
        ({4: 20, 16: 24.96, 64: 24}, None),  # 4 % may be noise
        ({4: 20, 16: 25.4, 64: 24}, 16),
        ({16: 24}, None),
    ],
)
def test_the_best_size(gb_per_s: dict[int, float], best: int | None) -> None:
    assert best_message_bytes(measured(gb_per_s)) == (None if best is None else best * MIB)


def test_no_best_size_where_time_does_not_depend_on_it() -> None:
    assert best_message_bytes([(1, 3.0), (2, 3.0)]) is None
    assert best_message_bytes([(1, 0.0), (2, 0.0)]) is None


def test_the_time_of_messages() -> None:
    squared = [message_ms(lambda size: size**2, 24, message) for message in (None, 24, 23, 12, 10, 1)]
    assert squared == [576, 576, 2 * 144, 2 * 144, 3 * 64, 24]
    assert message_ms(lambda size: 5.0, 0, 16) == 5.0, "an empty tensor is one message"


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("message_bytes", [16, 704, 4096, 10**6 * 16])
@pytest.mark.parametrize("elements", [1, 7, 384, 513, 100_003])
def test_messages_are_aligned_alike_and_not_too_long(elements: int, message_bytes: int, element_bytes: int) -> None:
    length = message_elements(elements, element_bytes, message_bytes)
    assert length * element_bytes % 16 == 0
    assert length * element_bytes <= message_bytes
    assert -(-elements // length) <= message_count(elements * element_bytes, message_bytes)
    if message_bytes >= 4096:
        assert -(-elements // length) == message_count(elements * element_bytes, message_bytes)
