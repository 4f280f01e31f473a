"""What one GPU rank checks; run by ``test_gpu.py`` with one process per GPU."""

from __future__ import annotations

import copy
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters

from oases_hf import OasesPlugin
from oases_hf.convert import block_count
from oases_hf.integrations.optimizers import watch_steps
from oases_hf.models.converted import Converted
from oases_hf.plan import SCHEDULE_NAMES, Recompute, ScheduleName, ShardOptimizer
from oases_hf.runtime.graphs import WARM
from tests.families import FAMILIES
from tests.parallel import full_gradients, full_parameters, one_step, parallel
from tests.parity import ZERO_GRADIENT_FLOOR, assert_gradients, assert_loss, assert_updates, float64_math
from tests.reference import gradients
from tests.test_comm_dtype import tolerance
from tests.test_dropout import slopes
from tests.tiny import batch, tiny_llama

ROWS, SEQ = 5, 16
BF16_LOSSES = 0.05
"""What losses in bf16 may differ by, of the largest, after a few hundred steps of different orders of summation."""


def on_gpu(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in data.items()}


def check_schedules() -> int:
    """All schedules, in float64 on NCCL, against the same model on one GPU."""
    compared, data = 0, on_gpu(batch(ROWS, SEQ, padded=True))
    whole = cast(Any, tiny_llama(hidden=64, heads=8, kv_heads=2)).cuda().train()
    with float64_math():
        expected = whole(**data).loss
        expected.backward()
    wanted = {name: gradient.cpu() for name, gradient in gradients(whole).items()}
    model = copy.deepcopy(whole)
    model.zero_grad()
    state = parallel(model, dist.get_world_size())
    for schedule, sub_batches, defer in itertools.product(SCHEDULE_NAMES, (1, 2, 3), (False, True)):
        state.stack.schedule, state.stack.sub_batches, state.stack.defer = schedule, sub_batches, defer
        for _ in range(WARM + 2):  # kernel by kernel, then recorded
            model.zero_grad()
            with float64_math():
                loss = model(**data).loss
                loss.backward()
                state.gradients.finish()
            assert_loss(loss, expected)
            assert_gradients(full_gradients(model), wanted)
        check_recorded(state)
        compared += 1
    return compared


def check_recorded(state: Converted) -> None:
    """The last forward was a recording's."""
    graphs = state.stack.graphs
    assert graphs is not None
    assert graphs._recordings, "nothing was recorded"
    assert next(reversed(graphs._recordings.values())) is not None, state.stack._said


def check_families() -> int:
    """A step of the other families, and the same with dropout: its gradient is that of the masks of its forward."""
    compared, world = 0, dist.get_world_size()
    for name, schedule in itertools.product(("gpt2", "neox", "bert", "gemma3"), SCHEDULE_NAMES):
        data = on_gpu(FAMILIES[name].batch(ROWS, SEQ, padding="right"))
        whole, model = (cast(Any, FAMILIES[name].model()).cuda().train() for _ in range(2))
        with float64_math():
            whole(**data).loss.backward()
        state = parallel(model, world, schedule)
        for _ in range(WARM + 2):
            one_step(model, [data])
        check_recorded(state)
        assert_gradients(full_gradients(model), {n: g.cpu() for n, g in gradients(whole).items()})
        for attn in FAMILIES[name].attentions:
            model = cast(Any, FAMILIES[name].model(attn=attn, dropout=0.3)).cuda().train()
            state = parallel(model, world, schedule)
            for _ in range(WARM):
                one_step(model, [data])
            model.zero_grad()
            slope, squared = slopes(model, state, data)
            check_recorded(state)
            assert abs(slope / squared - 1) < 1e-6, (name, schedule, attn, slope, squared)
            compared += 1
    return compared


def check_mixed() -> int:
    """Steps by plans whose blocks differ in degree and in what they recompute, some in short messages."""
    compared, world = 0, dist.get_world_size()
    for number, name in itertools.product(range(3), ("llama", "bert", "gemma3", "gpt2")):
        draw = random.Random(f"{number} {name}")
        data = on_gpu(FAMILIES[name].batch(ROWS, SEQ, padding="right"))
        whole, model = (cast(Any, FAMILIES[name].model()).cuda().train() for _ in range(2))
        with float64_math():
            whole(**data).loss.backward()
        blocks = block_count(whole)
        degrees = [draw.choice([d for d in (1, 2, 4) if d <= world]) for _ in range(blocks)]
        recompute: list[Recompute] = [draw.choice(["full", "none"]) for _ in range(blocks)]
        schedule, message_bytes = draw.choice(SCHEDULE_NAMES), draw.choice([None, 704])
        state = parallel(model, world, schedule, degrees=degrees, recompute=recompute, message_bytes=message_bytes)
        for _ in range(WARM + 2):
            one_step(model, [data])
        check_recorded(state)
        assert_gradients(full_gradients(model), {n: g.cpu() for n, g in gradients(whole).items()})
        compared += 1
    return compared


def check_rounded() -> int:
    """Steps whose sums are sent in bf16, kernel by kernel and then recorded."""
    compared, world = 0, dist.get_world_size()
    for name, schedule in itertools.product(("llama", "bert", "gemma3"), SCHEDULE_NAMES):
        data = on_gpu(FAMILIES[name].batch(ROWS, SEQ, padding="right"))
        whole, model = (cast(Any, FAMILIES[name].model()).cuda().train() for _ in range(2))
        with float64_math():
            whole(**data).loss.backward()
        state = parallel(model, world, schedule, comm_dtype="bf16")
        for _ in range(WARM + 2):
            one_step(model, [data])
            wanted = {n: g.cpu() for n, g in gradients(whole).items()}
            assert_gradients(full_gradients(model), wanted, relative=tolerance(world))
        check_recorded(state)
        compared += 1
    return compared


def check_compiled() -> int:
    """Steps of compiled blocks, kernel by kernel and then recorded; by then, everything is compiled."""
    compared, world = 0, dist.get_world_size()
    for name, schedule in itertools.product(("llama", "gpt2", "bert", "gemma3"), ("oases", "wang")):
        data = on_gpu(FAMILIES[name].batch(ROWS, SEQ, padding="right"))
        whole, model = (cast(Any, FAMILIES[name].model()).cuda().train() for _ in range(2))
        with float64_math():
            whole(**data).loss.backward()
        state, found = parallel(model, world, cast(ScheduleName, schedule), compile=True), []
        for _ in range(WARM + 2):
            one_step(model, [data])
            found.append(counters["stats"]["unique_graphs"])
        check_recorded(state)
        assert not state.stack._said
        assert found[WARM:] == [found[WARM - 1]] * 2
        assert_gradients(full_gradients(model), {n: g.cpu() for n, g in gradients(whole).items()})
        compared += 1
    assert counters["stats"]["unique_graphs"] > 0
    return compared


def weights_after_steps(way: ShardOptimizer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after three AdamW steps of replicas whose optimizer state is kept in one way or another."""
    model, world = cast(Any, FAMILIES["llama"].model()).cuda().train(), dist.get_world_size()
    state = parallel(model, world, degrees=[1, world // 2 or 1] * 2, shard_optimizer=way)
    watch_steps(state)
    assert bool(state.gradients.ownership.owners) == (way != "off")
    start = {name: tensor.clone() for name, tensor in full_parameters(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        one_step(model, [on_gpu(FAMILIES["llama"].batch(ROWS, SEQ, padding="right", seed=step))])
        state.gradients.clip(list(model.parameters()), 0.5)
        optimizer.step()
    return start, full_parameters(model)


def check_owned() -> int:
    """Owners of optimizer state train as all ranks would, by the parity criterion; returns how many parameters."""
    (start, plain), ways = weights_after_steps("off"), cast(tuple[ShardOptimizer, ...], ("keep", "reduce"))
    for way in ways:
        assert_updates(weights_after_steps(way)[1], plain, start, floor=ZERO_GRADIENT_FLOOR)
    return len(plain)


def train(mixed_precision: str, world: int) -> list[float]:
    """Losses of a few steps through Accelerate; ``world`` 1 leaves the model whole."""
    model: Any = tiny_llama(hidden=64, heads=8, kv_heads=2, dtype=torch.float32).train()
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=mixed_precision)
    if world > 1:
        model = OasesPlugin().install(accelerator, model)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model.to(accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(6):
        data = on_gpu(batch(ROWS, SEQ, seed=step))
        if world > 1:
            loss = model(**data).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        else:
            with torch.autocast("cuda", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[mixed_precision])):
                loss = model(**data).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def check_precisions() -> int:
    """Six steps in mixed precision, against one process."""
    for precision in ("bf16", "fp16"):
        ours, alone = train(precision, dist.get_world_size()), train(precision, 1)
        print(precision, ours, alone, flush=True)
        # fp16's first steps may be skipped while the scale settles; the first loss sees no update yet.
        first_only = slice(0, 1) if precision == "fp16" else slice(None)
        torch.testing.assert_close(ours[first_only], alone[first_only], rtol=2e-2, atol=0.0)
        assert all(torch.tensor(ours).isfinite())
    return 2


def check_switches() -> int:
    """Two hundred steps in bf16 with every switch on and off: the same losses, as near as bf16 has them."""
    settings: tuple[dict[str, Any], ...] = (
        {"cuda_graphs": False, "schedule": "megatron"},
        {"cuda_graphs": True, "schedule": "megatron"},
        {"cuda_graphs": False},
        {"cuda_graphs": True},
        {"defer_weight_grads": True},
        {"recompute": "none", "defer_weight_grads": True},
        {"sub_batches": 4},
        {"comm_dtype": "bf16"},
    )
    curves = [losses_of(200, **setting) for setting in settings]
    for setting, losses in zip(settings[1:], curves[1:], strict=True):
        difference = (losses - curves[0]).abs().max() / curves[0].abs().max()
        assert difference < BF16_LOSSES, (setting, float(difference))
    assert curves[0][-20:].mean() < 0.5 * curves[0][0], "nothing was learned, so nothing was compared"
    return len(curves)


def losses_of(steps: int, **setting: Any) -> torch.Tensor:
    """The losses of training on a few batches, over and over."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision="bf16")
    model: Any = tiny_llama(hidden=64, heads=8, kv_heads=2, dtype=torch.float32).train()
    model = OasesPlugin(**setting).install(accelerator, model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    losses = []
    for step in range(steps):
        loss = model(**on_gpu(batch(ROWS, SEQ, seed=step % 4))).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def check_long_rows() -> int:
    """Rows of 16 k tokens, where lanes are out of step for longest: overlapped as one after the other."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(99, (2, 16 * 1024), generator=drawn).cuda()
    found = []
    for schedule, rounds in ((SCHEDULE_NAMES[0], 1), ("oases", WARM + 4)):
        model: Any = tiny_llama(hidden=512, heads=8, kv_heads=8, dtype=torch.float32).train()
        model.config.max_position_embeddings = ids.shape[1]
        state = parallel(model.cuda(), dist.get_world_size(), schedule)
        for _ in range(rounds):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            state.gradients.finish()
            found.append(full_gradients(model))
    for gradients_ in found[1:]:
        assert_gradients(gradients_, found[0], relative=1e-4)
    return len(found) - 1


CHECKS = {
    "compared": check_schedules,
    "with dropout": check_families,
    "mixed": check_mixed,
    "rounded": check_rounded,
    "compiled": check_compiled,
    "owned": check_owned,
    "precisions": check_precisions,
    "switches": check_switches,
    "long rows": check_long_rows,
}


def main(chosen: Sequence[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for name in chosen or CHECKS:
        start = time.monotonic()
        print(name, CHECKS[name](), flush=True)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
