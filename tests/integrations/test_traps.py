"""What users stumble over: each is right, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from oases_hf import OasesCallback, OasesConfig, OasesPlugin
from oases_hf.errors import ConfigError, DistributedError, OasesError
from oases_hf.parallel import mesh

from ..parallel import full_gradients, parallel
from ..parity import assert_gradients, float64_math
from ..ranks import Worlds
from ..reference import gradients
from ..tiny import batch, tiny_llama

ROWS, SEQ = 4, 8


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(OasesError) as raised:
        act()
    return f"{type(raised.value).__name__}: {raised.value}"


def installed(**settings: Any) -> tuple[Accelerator, PreTrainedModel]:
    accelerator = Accelerator(cpu=True)
    return accelerator, OasesPlugin(**settings).install(accelerator, tiny_llama())


def layer_by_layer(model: PreTrainedModel) -> Tensor:
    return cast(Tensor, model(**batch(ROWS, SEQ, seed=1), output_hidden_states=True).loss)


def with_cache(model: PreTrainedModel) -> Tensor:
    return cast(Tensor, model(**batch(ROWS, SEQ, seed=1), use_cache=True).loss)


def hooked(model: PreTrainedModel) -> Tensor:
    handle = cast(Any, model).model.layers[0].register_forward_hook(lambda module, args, output: None)
    loss = cast(Tensor, model(**batch(ROWS, SEQ, seed=1)).loss)
    handle.remove()
    return loss


MIXED: dict[str, Callable[[PreTrainedModel], Tensor]] = {
    "hidden states": layer_by_layer,
    "cache": with_cache,
    "hooks": hooked,
}


def mixed_step(name: str) -> None:
    """A forward that the executor does not run, then one that it does, in one step of two data-parallel ranks."""
    alone = tiny_llama().train()
    accelerator, model = installed(tmp_size=1)
    model.train()
    with float64_math():
        for each, backward in ((alone, torch.autograd.backward), (model, accelerator.backward)):
            backward(MIXED[name](each) + each(**batch(ROWS, SEQ, seed=2)).loss)
    assert_gradients(full_gradients(model), gradients(alone))


@pytest.mark.parametrize("name", MIXED)
def test_forwards_with_and_without_the_executor_in_one_step(ranks: Worlds, name: str) -> None:
    ranks(2).run(mixed_step, name)


def penalty_on_weights() -> str:
    accelerator, model = installed(tmp_size=1)
    penalty = sum((p.pow(2).sum() for p in model.parameters()), torch.tensor(0.0))
    return refused(lambda: accelerator.backward(cast(Any, model(**batch(ROWS, SEQ)).loss) + penalty))


def test_a_gradient_that_changes_while_it_is_reduced_is_refused(ranks: Worlds) -> None:
    for message in ranks(2).run(penalty_on_weights):
        assert "in a backward of their own, before the model's" in message


def early_optimizer() -> str:
    accelerator, model = Accelerator(cpu=True), tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OasesPlugin().install(accelerator, model)
    accelerator.backward(model(**batch(ROWS, SEQ)).loss)
    return refused(optimizer.step)


def test_an_optimizer_made_before_the_model_was_sharded_is_refused(ranks: Worlds) -> None:
    for message in ranks(2).run(early_optimizer):
        assert "make it after OasesPlugin().install" in message


def whole_tensor_optimizer() -> str:
    accelerator, model = installed()
    optimizer = torch.optim.Adafactor(model.parameters())
    accelerator.backward(model(**batch(ROWS, SEQ)).loss)
    return refused(optimizer.step)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused(ranks: Worlds) -> None:
    for message in ranks(2).run(whole_tensor_optimizer):
        assert message.startswith("ConfigError: Adafactor looks at whole tensors")


def trainer_of(callback: OasesCallback | None, **settings: Any) -> Trainer:
    data = [{name: t[0] for name, t in batch(1, SEQ, seed=seed).items()} for seed in range(8)]
    args = TrainingArguments(
        "out", max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, **settings
    )
    callbacks = [callback] if callback else None
    return Trainer(tiny_llama(dtype=torch.float32), args, train_dataset=cast(Any, data), callbacks=cast(Any, callbacks))


def several_trainers() -> list[bool]:
    """One callback in two Trainers, then a Trainer without it, in one process."""
    callback = OasesCallback(OasesConfig())
    made = [trainer_of(callback, save_strategy="no"), trainer_of(callback, save_strategy="no")]
    made.append(trainer_of(None, save_strategy="no"))
    for trainer in made:
        trainer.train()
    return [hasattr(trainer.model, "oases") for trainer in made]


def test_trainers_one_after_the_other(ranks: Worlds) -> None:
    assert ranks(2).run(several_trainers) == [[True, True, False]] * 2


def push() -> int:
    trainer = trainer_of(OasesCallback(), save_strategy="no")
    trainer.args.push_to_hub = True
    with mock.patch.object(Trainer, "push_to_hub") as pushed:
        trainer.save_model("pushed")
    assert Path("pushed/model.safetensors").exists()
    return pushed.call_count


def test_all_ranks_push(ranks: Worlds) -> None:
    assert ranks(2).run(push) == [1, 1]


def stray_parameters() -> str:
    accelerator, model = installed()
    accelerator.backward(model(**batch(ROWS, SEQ)).loss)
    strays = [*model.parameters(), *torch.nn.Linear(3, 2).parameters()]
    return refused(lambda: accelerator.clip_grad_norm_(strays, 1.0))


def test_clipping_a_parameter_that_is_not_the_models_is_refused(ranks: Worlds) -> None:
    for message in ranks(2).run(stray_parameters):
        assert "a parameter of shape (2, 3) is not one of the converted model's" in message


def late_loss_function() -> tuple[int, ...]:
    _, model = installed()
    seen: list[tuple[int, ...]] = []

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        seen.append(tuple(logits.shape))
        return logits.mean()

    model.loss_function = loss
    model(**batch(ROWS, SEQ)).loss.backward()
    return seen[0]


def test_a_loss_function_set_later_sees_whole_logits(ranks: Worlds) -> None:
    assert ranks(2).run(late_loss_function) == [(ROWS, SEQ, 99)] * 2


def copied() -> str:
    _, model = installed()
    return refused(lambda: copy.deepcopy(model))


def test_a_converted_model_cannot_be_copied(ranks: Worlds) -> None:
    for message in ranks(2).run(copied):
        assert "copy the model before it is converted" in message


def gradient_hook() -> str:
    model = tiny_llama()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return refused(lambda: OasesPlugin().install(Accelerator(cpu=True), model))


def test_post_accumulate_hooks_are_refused(ranks: Worlds) -> None:
    for message in ranks(2).run(gradient_hook):
        assert "post-accumulate gradient hook" in message


def meetings() -> list[str]:
    """Rank 0 saves alone, survives that, and then all save."""
    state = parallel(tiny_llama(), 2)
    said = []
    with mock.patch.object(mesh, "RENDEZVOUS_TIMEOUT_S", 0.3):
        if state.mesh.world.rank == 0:
            with pytest.raises(DistributedError) as raised:
                state.mesh.meet("alone")
            said.append(str(raised.value))
    dist.barrier()
    state.mesh.meet("together")
    state.mesh.meet("again")
    return said


def test_ranks_meet_after_one_was_alone(ranks: Worlds) -> None:
    first, second = ranks(2).run(meetings, timeout_s=20)
    assert "rank 1 did not call it within 0.3 s" in first[0]
    assert second == []


def timeouts() -> list[timedelta]:
    state = parallel(tiny_llama(), 2)
    axes = (state.mesh.tmp, state.mesh.control, state.mesh.tmp_control)
    groups = [dist.group.WORLD, *(axis.group for axis in axes)]
    return [cast(Any, group)._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_groups_have_the_time_limit_of_the_world(ranks: Worlds) -> None:
    for limits in ranks(2).run(timeouts):
        assert len(set(limits)) == 1


def second_install() -> str:
    accelerator, _ = installed()
    return refused(lambda: OasesPlugin().install(accelerator, tiny_llama()))


def test_one_converted_model_per_accelerator(ranks: Worlds) -> None:
    for message in ranks(2).run(second_install):
        assert message.startswith(ConfigError.__name__)
        assert "make an Accelerator for each" in message
