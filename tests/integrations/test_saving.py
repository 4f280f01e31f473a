"""Exports: standard folders that plain from_pretrained reads, written by all ranks or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, Trainer

from oases_hf import Plan, save_pretrained
from oases_hf.checkpoint import Saving, load_export
from oases_hf.checkpoint import files as files_module
from oases_hf.checkpoint.files import TensorFile
from oases_hf.checkpoint.merging import merge
from oases_hf.convert import block_count
from oases_hf.models.converted import converted
from oases_hf.parallel import mesh as mesh_module
from oases_hf.profiler.stopwatch import peak_bytes

from ..families import FAMILIES
from ..pairwise import values_first
from ..parallel import parallel
from ..ranks import Worlds
from ..tiny import tiny_llama
from .fitting import Task, build, whole_parameters
from .looping import parameters, set_up

KIB = 1024


def reload(folder: str | Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """As one plain process does."""
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    model = getattr(transformers, architecture).from_pretrained(folder, dtype="auto")
    return model, {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_equal(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype is value.dtype
        assert ours[name].equal(value), name


def save_trainer(trainer: Trainer) -> None:
    trainer.save_model("export")


def save_by_argument(trainer: Trainer) -> None:
    trainer.args.output_dir = "export"
    trainer.save_model()


def save_by_model(trainer: Trainer) -> None:
    cast(Any, trainer.model).save_pretrained("export")


def save_by_function(trainer: Trainer) -> None:
    save_pretrained(cast(PreTrainedModel, trainer.model), "export")


def export(
    model: dict[str, Any],
    oases: dict[str, Any],
    save: Callable[[Trainer], None],
    steps: int,
    family: str | None = None,
) -> list[str]:
    """On a rank: train, save, and compare what one process loads, to the last bit; returns the files."""
    trainer = build(Task({"max_steps": steps}, model=model, family=family), oases)
    if steps:
        trainer.train()
    save(trainer)
    ours = whole_parameters(trainer)
    dist.barrier()
    model_there, there = reload(_shared("export"))
    assert_equal(there, ours)
    assert model_there.config.vocab_size == 99
    assert cast(Any, model_there.get_input_embeddings()).weight.shape[0] == 99
    return sorted(path.name for path in _shared("export").iterdir())


def _shared(folder: str) -> Path:
    """A folder of the run: all ranks work in the same one."""
    path = Path(folder).absolute()
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, str(path))
    assert len(set(names)) == 1
    return path


@pytest.mark.parametrize(
    ("sizes", "save"),
    values_first([(2, 2), (4, 4), (4, 2), (2, 1)], [save_trainer, save_by_argument, save_by_model, save_by_function]),
)
def test_reloads_bit_for_bit(ranks: Worlds, sizes: tuple[int, int], save: Callable[[Trainer], None]) -> None:
    """Case 8, and 6 after training."""
    world, tmp_size = sizes
    files = ranks(world).run(export, {}, {"tmp_size": tmp_size}, save, 2)[0]
    assert {"config.json", "model.safetensors"} <= set(files)


@pytest.mark.parametrize(("world", "steps"), [(2, 2), (4, 0)])
@pytest.mark.parametrize("family", ["gpt2 tied", "bert", "bert row"])
def test_other_families_reload(ranks: Worlds, family: str, world: int, steps: int) -> None:
    """Cases 6 and 8."""
    ranks(world).run(export, {}, {}, save_trainer, steps, family)


@pytest.mark.parametrize("world", [2, 4])
def test_what_was_not_trained_is_what_was_loaded(ranks: Worlds, world: int) -> None:
    """Case 6: 99 words on 2 and 4 ranks."""
    ranks(world).run(untouched)


def untouched() -> None:
    _, model = set_up({})
    save_pretrained(model, "export")
    dist.barrier()
    _, there = reload("export")
    assert_equal(there, dict(tiny_llama().named_parameters()))
    with safe_open("export/model.safetensors", "pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [99, 32]
        assert file.get_slice("lm_head.weight").get_shape() == [99, 32]


def files_of(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a folder's files, by their names there."""
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def written(family: str, alone: str, piece_bytes: int) -> None:
    """On a rank: every way to write a model gives the tensors that Hugging Face writes, and one way reads them."""
    model = FAMILIES[family].model()
    blocks = block_count(model)
    parallel(model, 4, degrees=[2, 4][:blocks] + [4] * (blocks - 2) if blocks > 1 else [4])
    expected = files_of(alone)
    with mock.patch.object(files_module, "PIECE_BYTES", piece_bytes):
        save_pretrained(model, "export", max_shard_size="20KB")
        Saving(model, [], Path("state"), lambda folder: None).finish()
    if dist.get_rank() == 0:
        assert_equal(files_of("export"), expected)
        merge(Path("state"), Path("merged"))
        assert_equal(files_of("merged"), expected)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    load_export(model, Path(alone))
    assert_equal(model.state_dict(), before)


OTHERS = ("mistral", "qwen2", "gpt2 row", "bert row", "bert token", "bert span", "bert bare")


@pytest.mark.parametrize(
    ("family", "piece_bytes"),
    [
        *(pytest.param(family, 500, marks=pytest.mark.slow if family in OTHERS else []) for family in FAMILIES),
        *(pytest.param(family, 2**26, marks=pytest.mark.slow) for family in ("llama", "neox", "bert")),
        ("gpt2 tied", 2**26),
    ],
)
def test_files_are_those_of_one_process(ranks: Worlds, tmp_path: Path, family: str, piece_bytes: int) -> None:
    FAMILIES[family].model().save_pretrained(tmp_path)
    ranks(4).run(written, family, str(tmp_path), piece_bytes)


def test_uneven_heads_and_ties(ranks: Worlds) -> None:
    sizes = {"heads": 9, "kv_heads": 3, "hidden": 36, "tied": True}
    for world in (2, 4):
        ranks(world).run(export, sizes, {}, save_trainer, 2)
        ranks(world).run(tied_once, sizes)


def tied_once(sizes: dict[str, Any]) -> None:
    trainer = build(Task(model=sizes), {})
    trainer.save_model("export")
    dist.barrier()
    with safe_open("export/model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model, _ = reload("export")
    assert model.get_input_embeddings().weight is cast(Any, model.get_output_embeddings()).weight


def sharded(limit: str | int) -> list[str]:
    """On a rank: export in small files; returns who wrote which, of the first world's ranks."""
    accelerator, model = set_up({"degree": 2})
    wrote: list[str] = []

    def tensor_file(path: Path, *rest: Any) -> TensorFile:
        wrote.append(path.name)
        return TensorFile(path, *rest)

    with mock.patch("oases_hf.checkpoint.export.TensorFile", tensor_file):
        accelerator.save_model(model, "export", max_shard_size=limit)
    ours = parameters(model)
    dist.barrier()
    _, there = reload("export")
    assert_equal(there, ours)
    return wrote


@pytest.mark.parametrize("limit", ["30KB", 30_000])
def test_files_are_small_and_written_by_several_ranks(ranks: Worlds, limit: str | int, tmp_path: Path) -> None:
    wrote = ranks(4).run(sharded, limit)
    assert wrote[0]
    assert wrote[1]
    assert not set(wrote[0]) & set(wrote[1])
    assert wrote[2:] == [[], []], "the second world has nothing to add"


def index_of_small_files() -> tuple[dict[str, str], dict[str, int]]:
    _, model = set_up({})
    save_pretrained(model, "export", max_shard_size=30_000)
    dist.barrier()
    index = json.loads(Path("export/model.safetensors.index.json").read_text())
    sizes = {path.name: path.stat().st_size for path in Path("export").glob("*.safetensors")}
    save_pretrained(model, "export")
    dist.barrier()
    assert [path.name for path in Path("export").glob("*.safetensors*")] == ["model.safetensors"], "of the first export"
    names = set(parameters(model))
    assert index["weight_map"].keys() == names
    return index["weight_map"], sizes


def test_the_index_names_every_tensor_and_a_later_export_leaves_nothing_behind(ranks: Worlds) -> None:
    weight_map, sizes = ranks(2).run(index_of_small_files)[0]
    assert set(weight_map.values()) == sizes.keys()
    assert len(sizes) > 3
    assert all(name.startswith("model-0000") for name in sizes)
    header = 4 * KIB
    assert max(sizes.values()) <= 30_000 + header


def peak_of_an_export() -> tuple[int, int]:
    """On a rank: the most bytes that an export holds beside the model, and those of the largest tensor."""
    _, model = set_up({})
    with peak_bytes(torch.device("cpu")) as peak:
        save_pretrained(model, "export")
    return peak(), max(layout.numel * 8 for layout in converted(model).layouts.values())


def test_an_export_holds_one_tensor_at_a_time(ranks: Worlds) -> None:
    found = ranks(4).run(peak_of_an_export)
    assert found[0][0] > 0, "it writes the file"
    for peak, largest in found:
        assert peak <= 2 * largest


SAVES: dict[str, Callable[[Trainer], object]] = {
    "Trainer.save_model": save_trainer,
    "Model.save_pretrained": save_by_model,
    "Accelerator.get_state_dict": lambda trainer: trainer.accelerator.get_state_dict(trainer.model),
}


def save_on(rank: int, family: str | None) -> list[tuple[str, float]]:
    """On a rank: save there only, and tell what came of it, and after how long."""
    trainer = build(Task(family=family), {})
    dist.barrier()
    if dist.get_rank() != rank:
        time.sleep(len(SAVES) * 0.5 + 1.0)  # alive, and elsewhere
        return []
    found = []
    with mock.patch.object(mesh_module, "RENDEZVOUS_TIMEOUT_S", 0.5):
        for save in SAVES.values():
            began = time.monotonic()
            try:
                save(trainer)
            except Exception as error:
                found.append((f"{type(error).__name__}: {error}", time.monotonic() - began))
    return found


@pytest.mark.parametrize(
    ("rank", "family"),
    [
        (0, None),
        pytest.param(1, None, marks=pytest.mark.slow),
        pytest.param(0, "gpt2 tied", marks=pytest.mark.slow),
        (1, "bert"),
    ],
)
def test_saving_on_one_rank_only_is_an_error(ranks: Worlds, rank: int, family: str | None) -> None:
    """Case 8."""
    found = ranks(2).run(save_on, rank, family, timeout_s=20)[rank]
    assert len(found) == len(SAVES)
    for message, seconds in found:
        assert message.startswith("DistributedError: ")
        assert f"must be called on every rank; rank {1 - rank} did not call it within 0.5 s" in message
        assert "Remove the `if rank == 0` around it" in message
        assert seconds < 3


def unwritable() -> str:
    trainer = build(Task(), {})
    if dist.get_rank() == 0:
        Path("export").write_text("in the way")
    dist.barrier()
    try:
        trainer.save_model("export")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(ranks: Worlds) -> None:
    for said in ranks(2).run(unwritable):
        assert said.startswith("CheckpointError: export could not be written: ")


def by_the_book() -> None:
    """On a rank: what Accelerate's documentation ends a loop with."""
    accelerator, model = set_up({"degree": 2})
    model = accelerator.prepare(model)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        "export", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save_model(model, "other")
    ours, state = parameters(model), accelerator.get_state_dict(model)
    dist.barrier()
    for folder in ("export", "other"):
        assert_equal(reload(folder)[1], ours)
    if accelerator.is_main_process:
        assert_equal(state, ours)
    else:
        assert not state


def test_saving_in_a_loop_of_ones_own(ranks: Worlds) -> None:
    ranks(2).run(by_the_book)
    ranks(4).run(by_the_book)


def exported_use_cache(value: bool) -> bool:
    model = tiny_llama()
    model.config.use_cache = value
    parallel(model, 2)
    save_pretrained(model, "export")
    found: bool = json.loads(Path("export", "config.json").read_text())["use_cache"]
    return found


@pytest.mark.parametrize("value", [True, False])
def test_an_export_uses_a_cache_if_the_model_did(ranks: Worlds, value: bool) -> None:
    assert ranks(2).run(exported_use_cache, value)[0] is value


def exported_plan() -> Plan:
    model = tiny_llama()
    state = parallel(model, 2, degrees=(1, 2, 2, 1))
    save_pretrained(model, "export")
    assert Plan.load("export/oases_plan.json") == state.plan
    return state.plan


def test_an_export_carries_its_plan(ranks: Worlds) -> None:
    (plan, _) = ranks(2).run(exported_plan)
    assert plan.degrees == (1, 2, 2, 1)
