"""Small cost tables: one to compute by hand, and random ones."""

from __future__ import annotations

import random

from oases_hf.costs import CostTable, Curve, ElementBytes, KindCosts, Outside, Slowdown, Timing


def divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def flat(ms: float) -> Curve:
    """The same time for every size."""
    return Curve(((1, ms), (2, ms)))


def by_hand(tmp_size: int = 2, **changes: object) -> CostTable:
    """One kind; at degree d: forward 8/d, recompute 6/d, backward 16/d ms; an all-reduce takes 3, a gather 5 ms."""
    timings = {
        degree: {
            sub_batches: Timing(8 / degree, 6 / degree, 16 / degree, 8 / degree, graph_bytes=100, runtime_bytes=40)
            for sub_batches in (1, 2, 4)
        }
        for degree in divisors(tmp_size)
    }
    fields: dict[str, object] = {
        "fingerprint": {"model": "by hand"},
        "tmp_size": tmp_size,
        "data_size": 1,
        "rows": 8,
        "sequence": 1,
        "hidden": 1,
        "element_bytes": ElementBytes(4, 4, 4, 4, 4, 8),
        "kinds": (KindCosts("block", {degree: 1000 // degree for degree in divisors(tmp_size)}, timings),),
        "all_reduce": {ranks: flat(3.0) for ranks in divisors(tmp_size)},
        "all_gather": {ranks: flat(5.0) for ranks in divisors(tmp_size)},
        "exchange": {ranks: flat(1.5) for ranks in divisors(tmp_size)},
        "slowdown": Slowdown(),
        "outside": Outside(ms=0.0, parameters=0, bytes=0),
        "optimizer_ms": 0.0,
    }
    return CostTable(**{**fields, **changes})  # type: ignore[arg-type]


def random_timing(draw: random.Random, degree: int, sub_batches: int) -> Timing:
    forward = draw.uniform(1, 3) * 8 / degree / sub_batches
    return Timing(
        forward_ms=forward,
        recompute_ms=forward * draw.uniform(0.6, 0.9),
        backward_ms=forward * draw.uniform(1.7, 2.3),
        weight_ms=forward,
        graph_bytes=draw.randrange(10_000, 40_000) // sub_batches,
        runtime_bytes=draw.randrange(5_000, 20_000) // sub_batches,
        shared_bytes=5_000 // sub_batches,
    )


def random_table(seed: int, tmp_size: int, kinds: int) -> CostTable:
    """Times that fall with the degree and all-reduces that grow with it, more or less."""
    draw = random.Random(seed)
    degrees = divisors(tmp_size)

    def kind(name: str) -> KindCosts:
        count = draw.randrange(1_000, 4_000)
        timings = {degree: {k: random_timing(draw, degree, k) for k in (1, 2, 4)} for degree in degrees}
        saved_hiddens, norm_hiddens = draw.choice(((1, 0), (2, 1)))  # without a norm behind blocks, and with one
        return KindCosts(
            name,
            parameters={degree: count // degree for degree in degrees},
            timings=timings,
            saved_hiddens=saved_hiddens,
            norm_hiddens=norm_hiddens,
        )

    def curve(ranks: int) -> Curve:
        latency = draw.uniform(0.1, 1.0)
        return Curve(((64, latency), (4096, latency + draw.uniform(0.5, 3.0) * (ranks - 1))))

    groups = sorted({ranks * worlds for ranks in degrees for worlds in (1, 2)})
    return CostTable(
        fingerprint={},
        tmp_size=tmp_size,
        data_size=draw.choice((1, 2)),
        rows=draw.choice((4, 7, 8)),
        sequence=16,
        hidden=8,
        element_bytes=draw.choice((ElementBytes(4, 4, 4, 4, 4, 8), ElementBytes(2, 2, 4, 4, 4, 8))),
        kinds=tuple(kind(name) for name in ("attention", "mlp")[:kinds]),
        all_reduce={ranks: curve(ranks) for ranks in groups},
        all_gather={ranks: curve(ranks) for ranks in groups},
        slowdown=draw.choice((Slowdown(), Slowdown(1.1, 1.3))),
        outside=Outside(ms=draw.uniform(1, 5), parameters=500, bytes=draw.choice((0, 30_000))),
        optimizer_ms=draw.uniform(10, 1000),
        exchange={ranks: curve(ranks) for ranks in groups},
    )
