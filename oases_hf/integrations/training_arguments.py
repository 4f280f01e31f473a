"""What becomes of every TrainingArguments setting once the model is sharded: works, neutralised or refused.

`TABLE` is the one place that says so, for transformers 5.17 to 5.24. A `works` row with a reason names
what OasesCallback must replace for the promise to hold. A dotted name is a setting inside a setting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainingArguments

Status = Literal["works", "neutralised", "refused"]
Predicate = Callable[["TrainingArguments"], bool]


@dataclass(frozen=True, slots=True)
class Handling:
    """How some settings are dealt with, why, and what the user should do instead."""

    settings: tuple[str, ...]
    status: Status
    why: str = ""
    advice: str = ""
    when: Predicate | None = None

    def concerns(self, args: TrainingArguments) -> bool:
        """Tell whether `args` ask for what this row is about; without a predicate, whether any setting is set."""
        return self.when(args) if self.when else any(value_of(args, name) for name in self.settings)

    def message(self, args: TrainingArguments) -> str:
        """Say which settings, with which values, why, and what to do."""
        values = {name: value_of(args, name) for name in self.settings}
        shown = {name: value for name, value in values.items() if value} or values
        return f"{', '.join(f'{name}={value!r}' for name, value in shown.items())}: {self.why}; {self.advice}"


def value_of(args: TrainingArguments, name: str) -> object:
    """Read a setting by its dotted name; None where it, or what should hold it, is absent."""
    value: object = args
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.value if isinstance(value, Enum) else value


def works(settings: str, why: str = "") -> Handling:
    """Settings that do what they do in one process, with the reason where that took something."""
    return Handling(tuple(settings.split()), "works", why)


def neutralised(settings: str, why: str, advice: str) -> Handling:
    """Settings that are accepted and have no effect."""
    return Handling(tuple(settings.split()), "neutralised", why, advice)


def refused(settings: str, why: str, advice: str, when: Predicate | None = None) -> Handling:
    """Settings that would compute something wrong, hang or mislead: for every truthy value, or when `when` says so."""
    return Handling(tuple(settings.split()), "refused", why, advice, when)


# -- Optimizers. After 8 CPU steps on matrices, whole and in uneven row and column shards, the elementwise ones are
#    bit-equal; others differ by 4 % (adafactor), 2 % (8 bit), 0.4 % (grokadamw), 0.1 % (stable_adamw) of the update.
ELEMENTWISE = (
    "adamw_torch adamw_torch_fused sgd adagrad rmsprop rmsprop_bnb rmsprop_bnb_32bit lion_32bit paged_lion_32bit "
    "ademamix paged_ademamix_32bit paged_adamw_32bit schedule_free_adamw schedule_free_radam schedule_free_sgd"
)
_NOT_ELEMENTWISE = {
    ("4bit", "8bit"): "it rounds its state in blocks and leaves small tensors alone, so shards are rounded otherwise",
    ("galore", "apollo"): "it projects whole matrices to a low rank, and the projection of a shard is a different one",
    ("adafactor", "stable_adamw", "grokadamw"): "it scales updates by statistics of the whole tensor, not of a shard",
    ("lomo",): "it updates weights inside backward, before gradients are summed over the ranks",
}


def _optim_has(*parts: str) -> Predicate:
    return lambda args: any(part in str(value_of(args, "optim")) for part in parts)


def _optim_unchecked(args: TrainingArguments) -> bool:
    known = _optim_has(*(part for parts in _NOT_ELEMENTWISE for part in parts))
    return not known(args) and value_of(args, "optim") not in ELEMENTWISE.split()


_USE_ADAMW = f"use an optimizer that acts on each element by itself: {ELEMENTWISE.replace(' ', ', ')}"
_OPTIMIZERS = (
    works("optim_target_modules liger_kernel_config", "read only by what is refused"),
    *(refused("optim", why, _USE_ADAMW, when=_optim_has(*parts)) for parts, why in _NOT_ELEMENTWISE.items()),
    refused("optim", "nobody has checked that it is right on shards", _USE_ADAMW, when=_optim_unchecked),
)


# -- Settings that depend on the number of processes: alone, a process has nobody to disagree with.
def _among_many(name: str, value: object) -> Predicate:
    return lambda args: args.world_size > 1 and value_of(args, name) == value


def _backend_untried(args: TrainingArguments) -> bool:
    """Accept None, "nccl", "gloo" and one per device, as "cpu:gloo,cuda:nccl"."""
    backends = (args.ddp_backend or "gloo").split(",")
    return any(backend.split(":")[-1] not in ("gloo", "nccl") for backend in backends)


_PROCESSES = (
    works("ddp_timeout", "the groups of the TMP world are created with the same timeout"),
    refused(
        "ddp_backend",
        "asynchronous all-reduces were tried with nccl and gloo only",
        "leave it unset, or choose 'nccl' on GPUs and 'gloo' on CPUs",
        when=_backend_untried,
    ),
    refused(
        "average_tokens_across_devices",
        "Trainer then divides this rank's token count by the size of the TMP world, which scales the loss up by it",
        "leave it True, its default: the loss is the mean over all tokens of the step, as in one process",
        when=_among_many("average_tokens_across_devices", False),
    ),
    refused(
        "train_sampling_strategy",
        "it deals samples to every process, and those of all but one rank of a TMP world would be dropped",
        "use 'group_by_length', which batches samples of like length too, or 'random'",
        when=_among_many("train_sampling_strategy", "batch_rebalance"),
    ),
    refused(
        "accelerator_config.dispatch_batches",
        "Accelerate then hands the same batch to every process, also to those that should see other data",
        "leave it unset or set it to False: each TMP world reads its own share, also of an IterableDataset",
        when=_among_many("accelerator_config.dispatch_batches", True),
    ),
    works("accelerator_config.dispatch_batches", "unset, it is False, also where Accelerate would pick True"),
    refused(
        "accelerator_config.even_batches",
        "TMP worlds with fewer batches would leave the others waiting in a collective",
        "leave it True, or set dataloader_drop_last=True to train on no sample twice",
        when=_among_many("accelerator_config.even_batches", False),
    ),
    neutralised(
        "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
        "gradients are synchronised in the last micro-batch only, with the same result",
        "remove it",
    ),
    works("accelerator_config.split_batches accelerator_config.use_seedable_sampler accelerator_config.non_blocking"),
    works("accelerator_config.use_configured_state accelerator_config.gradient_accumulation_kwargs.num_steps"),
    neutralised(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
        "DDP does not wrap a sharded model; gradients are synchronised block by block, under the backward",
        "remove it",
    ),
    refused(
        "n_gpu",  # a property, not a field: several GPUs visible to one process make Trainer use nn.DataParallel
        "one process sees several GPUs and Trainer would copy the model to each of them",
        "start one process per GPU (accelerate launch --multi_gpu --num_processes N), or set CUDA_VISIBLE_DEVICES=0",
        when=lambda args: args.n_gpu > 1,
    ),
)

# -- Settings by which something else would shard, wrap, rewrite or cast the model.
_MODEL = (
    neutralised(
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs",
        "every block recomputes or keeps its activations as the plan says, and checkpointing would recompute twice",
        "leave them out; nothing else is needed to save that memory",
    ),
    refused(
        "use_liger_kernel",
        "Trainer replaces modules of the model in train(), after they were sharded",
        "set use_liger_kernel=False; loss and logits are split over the ranks without it",
    ),
    refused(
        "neftune_noise_alpha",
        "Trainer hooks the embedding in train() and each rank would add noise of its own to what must be equal",
        "leave it unset; weight_decay and the dropout in the model's config regularise without it",
    ),
    refused(
        "torch_compile torch_compile_backend torch_compile_mode",
        "the compiler would trace through the collectives of the schedule",
        "set torch_compile=False and give neither backend nor mode, each of which turns it on",
    ),
    refused(
        "use_cache",
        "a key/value cache in training forwards takes the layers off the overlapped schedule",
        "leave it False; generate() has a cache of its own all the same",
    ),
    refused(
        "bf16_full_eval fp16_full_eval",
        "evaluate() casts the shards in place and for good, which later training and exports would suffer from",
        "set bf16=True or fp16=True instead, under which evaluation too runs in autocast",
    ),
    refused(
        "fsdp fsdp_config",
        "FSDP would shard the parameters a second time",
        "leave both unset; more ranks per batch (tmp_size, degree in OasesConfig) save memory instead",
    ),
    refused(
        "deepspeed",
        "DeepSpeed would wrap the model and own its optimizer",
        "leave it unset, and launch without --use_deepspeed",
        when=lambda args: bool(args.deepspeed) or getattr(args, "deepspeed_plugin", None) is not None,
    ),
    refused(
        "parallelism_config",
        "the mesh follows from the plan and would contradict this one",
        "leave it unset and set tmp_size in OasesConfig; the other ranks run data parallel",
    ),
    refused(
        "auto_find_batch_size",
        "a rank that runs out of memory would start over with smaller batches while the others wait for it",
        "set it to False and per_device_train_batch_size to a size that fits",
    ),
    refused(
        "debug",
        "its module hooks miss the sums that are made between ranks, so it would overlook an overflow there",
        "leave it empty; debug in one process without OasesCallback, or watch the logged grad_norm",
    ),
)

# -- What is written: checkpoints and exports, by all ranks.
_SAVING = (
    works("save_strategy save_steps save_total_limit", "every rank writes its part of a checkpoint"),
    works("save_only_model", "each checkpoint is an export by all ranks"),
    works("resume_from_checkpoint load_best_model_at_end", "every rank reads its part of a checkpoint"),
    works("metric_for_best_model greater_is_better", "metrics are equal on all ranks, so all save at once"),
    works(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
        "an export is complete on all ranks before rank 0 uploads it",
    ),
    works("ignore_data_skip restore_callback_states_from_checkpoint", "read when resuming only"),
    refused(
        "enable_jit_checkpoint",
        "ranks notice the signal at different steps, and a checkpoint needs all of them at the same one",
        "set it to False: SIGTERM and SIGINT end training with a checkpoint anyway",
    ),
    refused(
        "save_on_each_node",
        "an export is written once, by ranks of all nodes together",
        "set it to False and output_dir to a folder that all nodes share",
    ),
)

_AS_IN_ONE_PROCESS = (
    works("output_dir do_train do_eval do_predict local_rank remove_unused_columns label_names length_column_name"),
    works("per_device_train_batch_size per_device_eval_batch_size", "per TMP world, whose ranks share a batch"),
    works("num_train_epochs max_steps", "the data is divided by the number of TMP worlds"),
    works("gradient_accumulation_steps", "gradients are synchronised in the last micro-batch only"),
    works("learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps adam_beta1 adam_beta2 adam_epsilon"),
    works("weight_decay", "sharded and replaced modules keep the names and classes that Trainer excludes by"),
    works("max_grad_norm", "one norm over all ranks takes the place of the norm of this rank's shards"),
    works("label_smoothing_factor", "a vocabulary-parallel smoother takes the place of Trainer's"),
    works("fp16", "all ranks skip the same steps"),
    works("bf16 tf32 use_cpu torch_empty_cache_steps optim_args"),
    works("skip_memory_metrics", "without it, logs have no peak_memory_gib: counting that anew spoils Trainer's peaks"),
    works("seed data_seed full_determinism", "one seed for all ranks, and generators of its own for dropout"),
    works("logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node log_level"),
    works("log_level_replica disable_tqdm report_to run_name project"),
    works("trackio_space_id trackio_bucket_id trackio_static_space_id"),
    works("include_num_input_tokens_seen", "tokens are counted once per batch, not once per rank that shares it"),
    works("eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_accumulation_steps"),
    works("prediction_loss_only include_for_metrics batch_eval_metrics", "gathered over data-parallel ranks only"),
    works("eval_use_gather_object", "objects are gathered over the same ranks as tensors"),
    works("dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"),
    works(
        "dataloader_num_workers dataloader_multiprocessing_context dataloader_in_order",
        "batches are made equal within a TMP world before their tokens are counted",
    ),
)

TABLE: tuple[Handling, ...] = (*_AS_IN_ONE_PROCESS, *_SAVING, *_MODEL, *_PROCESSES, *_OPTIMIZERS)


def unclassed(args_cls: type) -> set[str]:
    """Name the fields of a TrainingArguments class that no row speaks of."""
    classed = {name.split(".")[0] for row in TABLE for name in row.settings}
    return {field.name for field in dataclasses.fields(args_cls)} - classed


def concerning(args: TrainingArguments, status: Status) -> list[Handling]:
    """List the rows of a status that `args` ask for: "refused" to raise, "neutralised" to tell the user."""
    return [row for row in TABLE if row.status == status and row.concerns(args)]


def refuse(args: TrainingArguments) -> None:
    """Raise ConfigError that names every refused setting in `args`, its value, why, and what to do."""
    found = [row.message(args) for row in concerning(args, "refused")]
    if found:
        raise ConfigError("TrainingArguments ask for what a sharded model cannot do:\n- " + "\n- ".join(found))
