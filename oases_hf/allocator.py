"""What torch's caching allocator takes of a GPU for a tensor. Imports neither torch nor transformers."""

from __future__ import annotations

MIB = 2**20


def allocated_bytes(size_bytes: int) -> int:
    """The share of its segments that a tensor of ``size_bytes`` has, without ``expandable_segments``.

    Tensors above 1 MiB and below 10 MiB are cut from segments of 20 MiB, larger ones have a segment to themselves, a
    multiple of 2 MiB; what is left of a segment serves few others. Smaller ones, of which many share a segment, count
    as they are. Source: kSmallSize, kMinLargeAlloc, kLargeBuffer and kRoundLarge of ``CUDACachingAllocator``.
    """
    if size_bytes <= MIB:
        return size_bytes
    if size_bytes < 10 * MIB:
        return 20 * MIB // (20 * MIB // size_bytes)
    return -(-size_bytes // (2 * MIB)) * 2 * MIB
