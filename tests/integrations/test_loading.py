"""load_pretrained: each rank reads and holds its part only, and has what from_pretrained gives one process."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from oases_hf import OasesCallback, OasesConfig, OasesPlugin, load_pretrained, save_pretrained
from oases_hf.checkpoint import Saving
from oases_hf.errors import CheckpointError, ConfigError, UnsupportedModelError
from oases_hf.models.converted import converted
from scripts.bench.process import bytes_read, forget

from ..families import FAMILIES, most_different
from ..launch import launch
from ..parallel import full, parallel
from ..parity import float64_math
from ..ranks import Worlds
from ..reference import loss_of
from ..tiny import batch, tiny_llama
from .lean import Cost
from .looping import set_up
from .test_saving import assert_equal

MIXED: dict[str, Any] = {"tmp_size": 4, "degree": 2}


def whole(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers of a converted model, those that are not saved too."""
    return full(model, dict(model.named_parameters())) | dict(model.named_buffers())


def loaded(auto: Any, folder: str, settings: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    """On a rank: what is loaded, on the CPU."""
    model = load_pretrained(auto, folder, OasesConfig(**settings), **options)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert not model.training
    return whole(model)


def expected(auto: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    model = auto.from_pretrained(folder, **options)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def family_loaded(name: str, folder: str) -> float:
    """On a rank: the loss of what is loaded."""
    tiny = FAMILIES[name]
    model = load_pretrained(tiny.auto, folder, OasesConfig(**MIXED), attn_implementation="eager", **tiny.options)
    with float64_math(), torch.no_grad():
        return float(loss_of(model, tiny.batch(4, 6)))


@pytest.mark.parametrize("name", most_different(FAMILIES))
def test_every_family_is_as_in_one_process(ranks: Worlds, tmp_path: Path, name: str) -> None:
    tiny = FAMILIES[name]
    tiny.model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    alone = expected(tiny.auto, tmp_path, **tiny.options)
    for found in ranks(4).run(loaded, tiny.auto, str(tmp_path), MIXED, **tiny.options):
        assert_equal(found, alone)
    if tiny.head != "none":
        model = tiny.auto.from_pretrained(tmp_path, attn_implementation="eager", **tiny.options)
        with float64_math(), torch.no_grad():
            loss = float(loss_of(model, tiny.batch(4, 6)))
        assert ranks(4).run(family_loaded, name, str(tmp_path)) == pytest.approx([loss] * 4, rel=1e-10)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["auto", "float32", torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_dtypes_and_ties(ranks: Worlds, tmp_path: Path, dtype: Any, tied: bool, world: int) -> None:
    tiny_llama(tied=tied).save_pretrained(tmp_path)
    alone = expected(AutoModelForCausalLM, tmp_path, dtype=dtype)
    for found in ranks(world).run(loaded, AutoModelForCausalLM, str(tmp_path), {}, dtype=dtype):
        assert_equal(found, alone)


def test_a_dtype_that_no_config_names_is_that_of_the_files(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for found in ranks(2).run(loaded, AutoModelForCausalLM, str(tmp_path), {}):
        assert found["lm_head.weight"].dtype is torch.bfloat16


def to_bin(folder: Path, *, shards: int = 1, zipped: bool = True) -> None:
    """What older versions of transformers have written."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    names = names if shards > 1 else ["pytorch_model.bin"]
    of_file = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        content = {key: tensors[key] for key, file in of_file.items() if file == name}
        torch.save(content, folder / name, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": of_file}))


@pytest.mark.parametrize(
    "how", [{}, {"shards": 3}, {"zipped": False}], ids=["one file", "three files", "of the oldest kind"]
)
def test_bin_files(ranks: Worlds, tmp_path: Path, how: Mapping[str, Any]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    alone = expected(AutoModelForCausalLM, tmp_path)
    to_bin(tmp_path, **how)
    for found in ranks(2).run(loaded, AutoModelForCausalLM, str(tmp_path), {}):
        assert_equal(found, alone)


def write_gguf(file: Path) -> None:
    """A tiny LLaMA in another library's format."""
    hidden, heads, ffn, vocab = 32, 4, 48, 99
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    shapes = {"token_embd": (vocab, hidden), "output": (vocab, hidden), "output_norm": (hidden,)}
    for layer in range(2):
        linears = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
        linears |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
        norms = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (linears | norms).items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(ranks: Worlds, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    alone = expected(AutoModelForCausalLM, tmp_path, gguf_file="tiny.gguf")
    for found in ranks(2).run(loaded, AutoModelForCausalLM, str(tmp_path), {}, gguf_file="tiny.gguf"):
        assert_equal(found, alone)


class Reports(logging.Handler):
    """Keeps what is said of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def reported(auto: Any, folder: str, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
    """On a rank: what is loaded, and what is said."""
    reports = Reports()
    logger = logging.getLogger("oases_hf.checkpoint.pretrained")
    logger.addHandler(reports)
    torch.manual_seed(torch.distributed.get_rank())  # ranks draw unlike each other
    try:
        return loaded(auto, folder, {}, **options), reports.said
    finally:
        logger.removeHandler(reports)


def test_what_is_missing_is_drawn_anew_and_what_is_too_much_is_named(ranks: Worlds, tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path)
    (found, said), (other, nothing) = ranks(2).run(
        reported, AutoModelForSequenceClassification, str(tmp_path), num_labels=7
    )
    assert found["score.weight"].shape == (7, 32)
    assert 0.01 < float(found["score.weight"].detach().std()) < 0.03, "drawn as the config says"
    assert_equal(found, other)
    kept = {name: tensor for name, tensor in model.named_parameters() if name != "lm_head.weight"}
    assert_equal({name: found[name] for name in kept}, kept)
    missing, unexpected = said
    assert "no score.weight: initialised at random" in missing
    assert "has lm_head.weight, which LlamaForSequenceClassification has no use for" in unexpected
    assert nothing == [], "one rank speaks"


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_the_base_of_a_model_and_a_model_on_a_base(ranks: Worlds, tmp_path: Path, name: str) -> None:
    """Names with and without the prefix of the base model; what is split by words may be missing too."""
    tiny = FAMILIES[name]
    tiny.model().save_pretrained(tmp_path / "whole")
    base: Any = tiny.model().base_model
    base.save_pretrained(tmp_path / "base")
    for found, _said in ranks(2).run(reported, AutoModel, str(tmp_path / "whole")):
        alone = expected(AutoModel, tmp_path / "whole")
        drawn = {key for key in alone if key.startswith("pooler")}  # of BERT's masked model
        assert_equal({k: v for k, v in found.items() if k not in drawn}, {k: alone[k] for k in alone.keys() - drawn})
    (found, said), *_ = ranks(2).run(reported, tiny.auto, str(tmp_path / "base"))
    kept = base.state_dict()
    prefix = tiny.model().base_model_prefix
    assert_equal({key: found[f"{prefix}.{key}"] for key in kept}, kept)
    assert "initialised at random" in said[0]
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_names_of_old_berts(ranks: Worlds, tmp_path: Path) -> None:
    FAMILIES["bert"].model().save_pretrained(tmp_path)
    alone = expected(FAMILIES["bert"].auto, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {k.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v for k, v in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    for found in ranks(2).run(loaded, FAMILIES["bert"].auto, str(tmp_path), {}):
        assert_equal(found, alone)


def refusal(auto: Any, folder: str, error: type[Exception], **options: Any) -> str:
    """On a rank: why a folder is not loaded."""
    with pytest.raises(error) as caught:
        loaded(auto, folder, {}, **options)
    return str(caught.value)


def test_a_wrong_shape_is_refused_by_name(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), CheckpointError, intermediate_size=50):
        assert "model.layers.0.mlp.gate_proj.weight has shape (48, 32)" in said
        assert "(50, 32)" in said


def test_a_missing_folder_and_an_empty_one_are_named(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), CheckpointError):
        assert f"{tmp_path} has no weights: neither model.safetensors nor pytorch_model.bin" in said
    for said in ranks(2).run(refusal, AutoModelForCausalLM, "nobody/nothing", CheckpointError):
        assert "nobody/nothing is no folder here, and no model that the hub gives" in said


@pytest.mark.parametrize("elsewhere", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_leads_elsewhere_is_refused(ranks: Worlds, tmp_path: Path, elsewhere: str) -> None:
    tiny_llama().save_pretrained(tmp_path / "here", max_shard_size="10KB")
    index = tmp_path / "here" / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["lm_head.weight"] = elsewhere
    index.write_text(json.dumps(fields))
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path / "here"), CheckpointError):
        assert f"names {elsewhere!r}, which is no file of this folder; refused" in said


@pytest.mark.parametrize("damage", ["truncated", "header"])
def test_a_damaged_file_is_named(ranks: Worlds, tmp_path: Path, damage: str) -> None:
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"\xff" * 8 + content[8:])
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), CheckpointError):
        assert f"{file} cannot be read" in said


def test_a_damaged_pickle_is_named_on_all_ranks(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    to_bin(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    first, second = ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), CheckpointError)
    assert f"{tmp_path / 'pytorch_model.bin'} cannot be read" in first
    assert "another rank reports the cause" in second


def test_a_quantised_model_is_refused(ranks: Worlds, tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), UnsupportedModelError):
        assert "is quantised" in said


def trained(folder: str | None, loading: Mapping[str, Any], installing: Mapping[str, Any]) -> dict[str, Tensor]:
    """On a rank: two steps of a model that is loaded, or of the same one converted."""
    if folder is None:
        accelerator, model = set_up(installing)
    else:
        model = load_pretrained(AutoModelForCausalLM, folder, OasesConfig(**loading))
        accelerator = Accelerator(cpu=True)
        assert OasesPlugin(**installing).install(accelerator, model) is model
    model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    for seed in range(2):
        accelerator.backward(model(**batch(4, 8, seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("settings", [{}, {"tmp_size": 2}, {**MIXED, "shard_optimizer": "keep"}], ids=str)
def test_it_trains_as_a_model_that_was_whole(ranks: Worlds, tmp_path: Path, settings: Mapping[str, Any]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    converted_whole, *_ = ranks(4).run(trained, None, {}, settings)
    for installing in ({}, settings):
        for found in ranks(4).run(trained, str(tmp_path), settings, installing):
            assert_equal(found, converted_whole)


def test_ties_that_the_files_contradict_are_refused(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), CheckpointError, tie_word_embeddings=True):
        assert "are both stored, and differ, but the model's config ties them" in said or "another rank" in said
    for found in ranks(2).run(loaded, AutoModelForCausalLM, str(tmp_path), {}, tie_word_embeddings=False):
        assert_equal(found, expected(AutoModelForCausalLM, tmp_path))


def test_a_gguf_that_lacks_a_head(ranks: Worlds, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    options: dict[str, Any] = {"gguf_file": "tiny.gguf", "num_labels": 5, "pad_token_id": 0}
    (found, said), (other, _) = ranks(2).run(reported, AutoModelForSequenceClassification, str(tmp_path), **options)
    assert found["score.weight"].shape == (5, 32)
    assert_equal(found, other)
    assert "no score.weight: initialised at random" in said[0]


@pytest.mark.parametrize(
    ("option", "expected_text"),
    [({"torch_dtype": "float32"}, "torch_dtype is called dtype"), ({"device_map": "auto"}, "device_map")],
    ids=str,
)
def test_arguments_it_does_not_take(
    ranks: Worlds, tmp_path: Path, option: Mapping[str, Any], expected_text: str
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for said in ranks(2).run(refusal, AutoModelForCausalLM, str(tmp_path), ConfigError, **option):
        assert expected_text in said


def of_training(folder: str) -> str:
    """On a rank: a training checkpoint is no model, but for one that has an export beside it."""
    model = tiny_llama()
    parallel(model, 2)
    Saving(model, [], Path(folder), lambda there: None).finish()
    said = refusal(AutoModelForCausalLM, folder, CheckpointError)
    torch.distributed.barrier()
    save_pretrained(model, folder)
    assert_equal(loaded(AutoModelForCausalLM, folder, {}), whole(model))
    return said


def test_training_checkpoints(ranks: Worlds, tmp_path: Path) -> None:
    for said in ranks(2).run(of_training, str(tmp_path / "checkpoint-1")):
        assert "is a training checkpoint: resume from it, or make a model of it with `oases-hf merge`" in said


def settings_kept(folder: str) -> tuple[Any, Any, int]:
    """On a rank: what of load_pretrained's settings the Trainer has, and for how many ranks a batch is."""
    oases = OasesConfig(tmp_size=2, async_save=True, ignore_failed_saves=True)
    model = load_pretrained(AutoModelForCausalLM, folder, oases)
    arguments = TrainingArguments("out", use_cpu=True, report_to="none")
    trainer = Trainer(model, arguments, callbacks=[OasesCallback(OasesConfig(degree=2))])
    checkpoints = cast(Any, trainer.train).func.__self__
    return checkpoints._config.async_save, checkpoints._config.ignore_failed_saves, converted(model).mesh.tmp.size


def test_the_callback_has_the_settings_of_loading(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama(dtype=torch.float32).save_pretrained(tmp_path)
    assert ranks(4).run(settings_kept, str(tmp_path)) == [(True, True, 2)] * 4


def trained_alone(folder: str) -> str:
    """On a rank: what is said when neither the callback nor the plugin has a loaded model."""
    model = load_pretrained(AutoModelForCausalLM, folder)
    rows = batch(4, 8)
    with torch.no_grad():
        model(**rows)
    with pytest.raises(ConfigError) as raised:
        model.train()(**rows)
    OasesPlugin().install(Accelerator(cpu=True), model)
    model(**rows)
    return str(raised.value)


def test_a_loaded_model_is_not_trained_alone(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for said in ranks(2).run(trained_alone, str(tmp_path)):
        assert "callbacks=[OasesCallback()]" in said


def contradicted(folder: str) -> list[str]:
    """On a rank: why a loaded model is not installed by other settings, or twice."""
    model = load_pretrained(AutoModelForCausalLM, folder, OasesConfig(degree=2, message_mib=2))
    with pytest.raises(ConfigError) as other:
        OasesPlugin(degree=1).install(Accelerator(cpu=True), model)
    with pytest.raises(ConfigError) as shorter:
        OasesPlugin(message_mib=1).install(Accelerator(cpu=True), model)
    with pytest.raises(ConfigError) as rounded:
        OasesPlugin(comm_dtype="bf16").install(Accelerator(cpu=True), model)
    OasesPlugin(message_mib=2).install(Accelerator(cpu=True), model)
    with pytest.raises(UnsupportedModelError) as twice:
        OasesPlugin().install(Accelerator(cpu=True), model)
    return [str(each.value) for each in (other, shorter, rounded, twice)]


def test_other_settings_and_a_second_accelerator_are_refused(ranks: Worlds, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for other, shorter, rounded, twice in ranks(2).run(contradicted, str(tmp_path)):
        assert "degree=1, and load_pretrained has converted the model with degree=2" in other
        assert "message_mib=1, and load_pretrained has converted the model with message_mib=2.0" in shorter
        assert "comm_dtype='bf16', and load_pretrained has converted the model with comm_dtype=None" in rounded
        assert "converted already" in twice


def comes_from_a_disk(folder: Path) -> bool:
    """Whether the kernel counts what is read from a folder."""
    size, before = forget(folder), bytes_read()
    for path in folder.glob("*.safetensors"):
        path.read_bytes()
    return bytes_read() - before >= 0.9 * size


def test_ranks_read_a_file_once_and_hold_their_share(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 8, "dtype": torch.float32}
    tiny_llama(layers=1, **sizes).save_pretrained(tmp_path / "small")
    big = tmp_path / "big"
    tiny_llama(hidden=1024, ffn=2752, vocab=8000, layers=3, **sizes).save_pretrained(big, max_shard_size="100MB")
    counts = comes_from_a_disk(big)
    size = forget(big)
    done = launch(2, ["-m", "tests.integrations.lean", tmp_path / "small", big])
    assert [each.returncode for each in done] == [0, 0], done
    costs = [Cost(**json.loads(each.stdout.splitlines()[-1])) for each in done]
    for cost in costs:
        assert size / 2 < cost.share < cost.peak <= 1.1 * (cost.share + cost.largest)
    if counts:  # elsewhere, as in memory, nothing is read from a disk
        assert 0.9 * size < sum(cost.read for cost in costs) <= 1.4 * size
