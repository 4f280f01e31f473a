"""Every TrainingArguments field is classed, defaults pass, and each refusal names the setting and a way out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate import ParallelismConfig
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from oases_hf.errors import ConfigError
from oases_hf.integrations.training_arguments import ELEMENTWISE, TABLE, Handling, concerning, refuse, unclassed

FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
ONLY_IN_5_24 = {"activation_checkpointing", "activation_checkpointing_kwargs"}
CHECKPOINTING = "activation_checkpointing" if ONLY_IN_5_24 <= FIELDS else "gradient_checkpointing"


def real(folder: Path, **values: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **values)


def stand_in(folder: Path, **values: Any) -> TrainingArguments:
    """Defaults with `values` laid over them: for what takes several processes, a GPU or a package to build."""
    args = {"world_size": 1, "n_gpu": 1} | vars(real(folder)) | values
    return cast(TrainingArguments, SimpleNamespace(**args))


# (values to build with, whether a stand-in must do, what the message must show)
REFUSED: list[tuple[dict[str, Any], bool, str]] = [
    ({"use_liger_kernel": True}, False, "use_liger_kernel=True"),
    ({"neftune_noise_alpha": 5.0}, False, "neftune_noise_alpha=5.0"),
    ({"torch_compile": True}, False, "torch_compile=True"),
    ({"torch_compile_mode": "max-autotune"}, False, "torch_compile_mode='max-autotune'"),
    ({"torch_compile_backend": "eager"}, False, "torch_compile_backend='eager'"),
    ({"use_cache": True}, False, "use_cache=True"),
    ({"bf16_full_eval": True}, False, "bf16_full_eval=True"),
    ({"fp16_full_eval": True}, False, "fp16_full_eval=True"),
    ({"fsdp": True}, False, "fsdp=True"),
    ({"fsdp_config": {"version": 2}}, False, "fsdp_config="),
    ({"deepspeed": "zero3.json"}, True, "deepspeed='zero3.json'"),
    ({"deepspeed_plugin": object()}, True, "deepspeed=None"),
    ({"parallelism_config": ParallelismConfig(tp_size=2)}, False, "parallelism_config="),
    ({"auto_find_batch_size": True}, False, "auto_find_batch_size=True"),
    ({"debug": "underflow_overflow"}, False, "debug="),
    ({"enable_jit_checkpoint": True}, False, "enable_jit_checkpoint=True"),
    ({"save_on_each_node": True}, False, "save_on_each_node=True"),
    ({"ddp_backend": "mpi"}, True, "ddp_backend='mpi'"),
    ({"average_tokens_across_devices": False, "world_size": 2}, True, "average_tokens_across_devices=False"),
    (
        {"train_sampling_strategy": "batch_rebalance", "world_size": 2},
        True,
        "train_sampling_strategy='batch_rebalance'",
    ),
    ({"accelerator_config": AcceleratorConfig(dispatch_batches=True), "world_size": 2}, True, "dispatch_batches=True"),
    ({"accelerator_config": AcceleratorConfig(even_batches=False), "world_size": 2}, True, "even_batches=False"),
    ({"n_gpu": 4}, True, "n_gpu=4"),
    ({"optim": "a_later_one"}, True, "optim='a_later_one'"),
    *(({"optim": name}, False, f"optim='{name}'") for name in ["adamw_8bit", "galore_adamw", "adafactor", "adalomo"]),
]


def build(folder: Path, values: dict[str, Any], as_stand_in: bool) -> TrainingArguments:
    return stand_in(folder, **values) if as_stand_in else real(folder, **values)


@pytest.mark.parametrize(("values", "as_stand_in", "shown"), REFUSED, ids=[shown for _, _, shown in REFUSED])
def test_a_refusal_names_the_setting_its_value_and_what_to_do(
    tmp_path: Path, values: dict[str, Any], as_stand_in: bool, shown: str
) -> None:
    args = build(tmp_path, values, as_stand_in)
    with pytest.raises(ConfigError) as raised:
        refuse(args)
    rows = concerning(args, "refused")
    assert shown in str(raised.value)
    assert rows
    assert all(row.why in str(raised.value) and row.advice in str(raised.value) for row in rows)


def test_every_refused_row_is_exercised_above(tmp_path: Path) -> None:
    met = {row for values, fake, _ in REFUSED for row in concerning(build(tmp_path, values, fake), "refused")}
    assert met == {row for row in TABLE if row.status == "refused"}


def test_all_refused_settings_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)use_liger_kernel=True.*auto_find_batch_size=True"):
        refuse(real(tmp_path, auto_find_batch_size=True, use_liger_kernel=True))


def test_defaults_are_accepted_in_one_process_and_in_many(tmp_path: Path) -> None:
    refuse(real(tmp_path))
    refuse(stand_in(tmp_path, world_size=8))


def test_what_only_many_processes_disagree_on_is_accepted_in_one(tmp_path: Path) -> None:
    loader = {"dispatch_batches": True, "even_batches": False}
    refuse(real(tmp_path, average_tokens_across_devices=False, accelerator_config=loader))
    refuse(real(tmp_path, train_sampling_strategy="batch_rebalance"))


def test_backends_may_be_named_per_device(tmp_path: Path) -> None:
    refuse(stand_in(tmp_path, ddp_backend="cpu:gloo,cuda:nccl"))
    with pytest.raises(ConfigError, match="ddp_backend"):
        refuse(stand_in(tmp_path, ddp_backend="cpu:mpi,cuda:nccl"))


def test_every_field_is_classed() -> None:
    assert not unclassed(TrainingArguments), "decide what becomes of these and add them to TABLE"


def test_every_classed_setting_exists() -> None:
    known = FIELDS | ONLY_IN_5_24 | {"n_gpu"}
    assert {name.split(".")[0] for row in TABLE for name in row.settings} == known


def test_every_data_loader_setting_is_classed() -> None:
    dotted = [name.split(".") for row in TABLE for name in row.settings if name.startswith("accelerator_config.")]
    assert {name[1] for name in dotted} == {field.name for field in dataclasses.fields(AcceleratorConfig)}


def test_a_setting_has_one_row_unless_its_values_are_told_apart() -> None:
    plain = [name for row in TABLE for name in row.settings if row.when is None]
    assert len(plain) == len(set(plain))


def test_every_optimizer_works_or_is_refused_for_a_reason_of_its_own(tmp_path: Path) -> None:
    reasons = {name.value: concerning(stand_in(tmp_path, optim=name), "refused") for name in OptimizerNames}
    assert {name for name, rows in reasons.items() if not rows} == set(ELEMENTWISE.split())
    unchecked = {name for name, rows in reasons.items() if any("nobody has checked" in row.why for row in rows)}
    assert unchecked == {"adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"}


def test_checkpointing_and_ddp_requests_are_accepted_and_reported(tmp_path: Path) -> None:
    asked: dict[str, Any] = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}
    each_batch = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    args = real(tmp_path, **asked, ddp_bucket_cap_mb=25, accelerator_config=each_batch)
    refuse(args)
    told = "\n".join(row.message(args) for row in concerning(args, "neutralised"))
    assert f"{CHECKPOINTING}=True" in told
    assert "nothing else is needed to save that memory" in told
    assert "ddp_bucket_cap_mb=25" in told
    assert "sync_each_batch=True" in told
    assert not concerning(real(tmp_path), "neutralised")


@pytest.mark.parametrize("row", [row for row in TABLE if row.status != "works"], ids=lambda row: " ".join(row.settings))
def test_every_message_says_why_and_starts_its_advice_with_what_to_do(row: Handling) -> None:
    assert row.why
    assert row.advice.split()[0] in {"use", "leave", "set", "load", "start", "choose", "remove"}
