"""How fast are training states and exports written and read, beside a plain sequential write of the same bytes?

    torchrun --nproc-per-node 2 scripts/bench/checkpoint.py --folder /data/there

A LLaMA is trained for a step with AdamW, then saved, loaded and exported a few times, and the export loaded by
load_pretrained. Printed are medians, in GB/s of all ranks together. Writes end when the disk says that it has all, and
what is read comes from there. Of load_pretrained also: what all ranks read, per byte of the files, and the most memory
that a rank took, per byte of its share of the weights and their largest part.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from oases_hf import OasesPlugin, load_pretrained, save_pretrained
from scripts.bench.llama import build, config_of
from scripts.bench.process import Peak, bytes_read, forget

CHUNK_BYTES = 2**24
SEQUENCE = 16


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 2048, "heads": 16, "ffn": 5504, "layers": 8, "vocab": 32000, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: that of temporary files)")
    return parser.parse_args(argv)


def seconds(work: Callable[[], object]) -> float:
    """From when all ranks begin until all have ended."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    work()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began


def write_plainly(file: Path, size_bytes: int) -> None:
    """One process, one file, one write after the other."""
    chunk = os.urandom(CHUNK_BYTES)
    with file.open("wb", buffering=0) as opened:
        for _ in range(size_bytes // CHUNK_BYTES):
            opened.write(chunk)
        os.fsync(opened.fileno())
    file.unlink()


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def load(folder: Path) -> tuple[int, float]:
    """Bytes that this rank has read, and the most memory that it took, per byte of its share and its largest part."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before is taken again, and not counted
    before = bytes_read()
    with Peak() as peak:
        model: Any = load_pretrained(LlamaForCausalLM, folder)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    return bytes_read() - before, peak.bytes / (sum(sizes) + max(sizes))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on the ranks that a launcher started."""
    options = parse_options(argv)
    accelerator = Accelerator()
    model: Any = OasesPlugin().install(accelerator, build(config_of(options, options.vocab, SEQUENCE)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.ones(2, SEQUENCE, dtype=torch.long, device=accelerator.device)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    first = accelerator.is_main_process
    told = [tempfile.mkdtemp(dir=options.folder) if first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    folder = Path(str(told[0]))
    works: dict[str, Callable[[], object]] = {
        "save_state": lambda: accelerator.save_state(str(folder / "state")),
        "load_state": lambda: accelerator.load_state(str(folder / "state")),
        "export": lambda: save_pretrained(model, folder / "export"),
        "load_pretrained": lambda: leans.append(load(folder / "export")),
    }
    of_export = {"export", "load_pretrained"}
    leans: list[tuple[int, float]] = []
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            there = folder / ("export" if name in of_export else "state")
            if name.startswith("load"):
                forget(there)
            ours_s = seconds(work)
            size = size_of(there)
            plain_s = seconds(lambda size=size: write_plainly(folder / "plain", size) if first else None)  # type: ignore[misc]
            figures[name].append((size / ours_s, size / plain_s))
    everyone = [leans[0]] * accelerator.num_processes
    if dist.is_initialized():
        dist.all_gather_object(everyone, leans[0])
    if first:
        print(f"{'':15}     GB  GB/s  plain write GB/s  ratio")
        for name, rates in figures.items():
            ours, plain = (statistics.median(each) for each in zip(*rates, strict=True))
            ratio = statistics.median(a / b for a, b in rates)
            gigabytes = size_of(folder / ("export" if name in of_export else "state")) / 1e9
            print(f"{name:15}  {gigabytes:5.1f}  {ours / 1e9:4.2f}  {plain / 1e9:16.2f}  {ratio:5.2f}")
        size, peak = size_of(folder / "export"), max(peak for _, peak in everyone)
        print(f"load_pretrained: read {sum(read for read, _ in everyone) / size:.2f} x the files; memory {peak:.2f} x")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
