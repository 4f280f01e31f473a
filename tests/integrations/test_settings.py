"""Settings: arguments, environment variables, plans; and the line that says what was made of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from oases_hf import OasesConfig, OasesPlugin, Plan
from oases_hf.errors import ConfigError
from oases_hf.models.converted import converted
from oases_hf.plan import SCHEDULE_NAMES

from ..ranks import Worlds
from .fitting import Task
from .looping import set_up
from .test_trainer import check

PLAN = Plan("llama, hidden 32, 2 layers", 2, (2,) * 4, "merak", 3)
MIXED = Plan("llama, hidden 32, 2 layers", 4, (4, 2, 1, 2), "oases", 2, ("full", "none", "none", "full"), "keep", 512)


def test_variables_fill_in_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "OASES_TMP_SIZE": "4",
        "OASES_SCHEDULE": "wang",
        "OASES_SUB_BATCHES": "3",
        "OASES_RECOMPUTE": "none",
        "OASES_DEFER_WEIGHT_GRADS": "yes",
        "OASES_GATHER_LOGITS": "0",
        "OASES_SHARD_OPTIMIZER": "reduce",
        "OASES_MESSAGE_MIB": "0.5",
        "OASES_COMPILE": "1",
        "OASES_COMM_DTYPE": "bf16",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    others: dict[str, Any] = {"message_mib": 0.5, "compile": True, "comm_dtype": "bf16"}
    expected = OasesConfig(4, None, "wang", 1, "none", True, False, "reduce", **others)
    assert OasesConfig(sub_batches=1) == expected
    assert vars(OasesPlugin(sub_batches=1)) == vars(expected)
    assert OasesConfig(schedule="merak").schedule == "merak"
    assert [OasesConfig(shard_optimizer=word).shard_optimizer for word in (True, False)] == ["keep", "off"]


# (variables, arguments, what is said)
REFUSED: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"OASES_DEGREE": "two"}, {}, "OASES_DEGREE='two' cannot be read as degree"),
    ({"OASES_TMP_SIZE": "two"}, {}, "OASES_TMP_SIZE='two' cannot be read as int"),
    ({"OASES_TMPSIZE": "2"}, {}, "OASES_TMPSIZE in the environment is no setting; there are OASES_ASYNC_SAVE, "),
    ({"OASES_PEAK_TFLOPS": "-1"}, {}, "peak_tflops=-1; give the peak of a GPU, in 1e12 operations per second"),
    ({}, {"sub_batches": 2.5}, "sub_batches=2.5; give a whole number"),
    ({}, {"compile": "inductor"}, "compile='inductor'; give True or False"),
    ({}, {"async_save": "no"}, "async_save='no'; give True or False"),
    ({}, {"degree": "most"}, "degree='most'; choose a number of ranks, or 'auto'"),
    ({}, {"degree": "auto", "schedule": "wang"}, "degree='auto' plans for the schedule oases, not wang; leave"),
    ({}, {"recompute": "auto"}, "recompute='auto'; choose full or none"),
    ({}, {"degree": "auto", "memory_gib": 0}, "memory_gib=0; give what a rank may use, in GiB"),
    ({"OASES_GATHER_LOGITS": "perhaps"}, {}, "OASES_GATHER_LOGITS='perhaps' cannot be read as flag"),
    ({}, {"degree": 0}, "degree=0; choose 1 or more"),
    ({}, {"tmp_size": 4, "degree": 3}, "degree=3 does not divide tmp_size=4; choose a divisor of 4"),
    ({}, {"recompute": "some"}, "recompute='some'; choose full or none"),
    ({"OASES_SHARD_OPTIMIZER": "1"}, {}, "shard_optimizer='1'; choose off, keep or reduce"),
    ({}, {"plan": PLAN, "shard_optimizer": True}, "plan and shard_optimizer are both set; the plan holds shard_optim"),
    ({}, {"message_mib": 0}, "message_mib=0; give the size of a message, in MiB, above 0"),
    ({"OASES_MESSAGE_MIB": "inf"}, {}, "message_mib=inf; give the size of a message, in MiB, above 0"),
    ({"OASES_MESSAGE_MIB": "16"}, {"plan": PLAN}, "plan and message_mib are both set; the plan holds message_mib: le"),
    ({}, {"comm_dtype": "fp16"}, "comm_dtype='fp16'; choose bf16, or leave it out to send what is computed"),
    ({"OASES_COMM_DTYPE": "16"}, {}, "comm_dtype='16'; choose bf16, or leave it out to send what is computed"),
    ({}, {"schedule": "fast"}, "schedule 'fast' is unknown; choose one of megatron, wang, merak, cross_pass, oases"),
    ({}, {"plan": PLAN, "schedule": "wang"}, "plan and schedule are both set; the plan holds schedule: leave one out"),
    ({"OASES_DEGREE": "2"}, {"plan": PLAN}, "plan and degree are both set; the plan holds degree: leave one out"),
]


@pytest.mark.parametrize(("variables", "arguments", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_settings_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arguments: dict[str, Any], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(said)):
        OasesConfig(**arguments)


def test_plans_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    assert Plan.load(path) == PLAN
    assert OasesConfig(plan=str(path)).load_plan() == PLAN
    assert Plan.from_json(MIXED.to_json()) == MIXED
    new = {"shard_optimizer", "message_bytes"}
    old = {name: value for name, value in json.loads(PLAN.to_json()).items() if name not in new}
    assert Plan.from_json(json.dumps(old)) == PLAN
    path.write_text('{"degrees": [2, 2]}')
    with pytest.raises(ConfigError, match=r"plan .*plan.json: this is no plan .*write one with Plan.to_json"):
        Plan.load(path)


def test_a_degree_of_a_plan_divides_its_ranks() -> None:
    with pytest.raises(ConfigError, match=r"block 1: degree 3 does not divide the TMP world of 4 ranks; choose one of"):
        Plan("llama", 4, (4, 3))
    with pytest.raises(ConfigError, match=r"degrees 2 and 3 in one plan; each must divide the next higher one"):
        Plan("llama", 6, (2, 3))
    with pytest.raises(ConfigError, match=r"recompute \('full',\) of 2 blocks; give each `full` or `none`"):
        Plan("llama", 2, (2, 1), recompute=("full",))
    with pytest.raises(ConfigError, match=r"shard_optimizer='on'; choose off, keep or reduce"):
        Plan("llama", 2, (2, 1), shard_optimizer="on")  # type: ignore[arg-type]
    for message_bytes in (0, -16, 40):
        with pytest.raises(ConfigError, match=f"message_bytes={message_bytes}; choose a multiple of 16, or None"):
            Plan("llama", 2, (2, 1), message_bytes=message_bytes)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_schedule_trains(ranks: Worlds, schedule: str) -> None:
    check(ranks, 4, Task(), tmp_size=2, schedule=schedule, defer_weight_grads=schedule == "oases")


def test_a_plan_trains(ranks: Worlds) -> None:
    check(ranks, 2, Task({"per_device_train_batch_size": 4}), plan=PLAN)
    assert ranks(2).run(sizes, {"plan": PLAN}, {}) == [(2, 1, "merak", 3)] * 2


@pytest.mark.parametrize(
    "settings",
    [{"plan": MIXED}, {"tmp_size": 4, "degree": 2}, {"tmp_size": 2, "degree": 1, "recompute": "none"}],
    ids=["mixed", "replicas", "replicas and worlds"],
)
def test_blocks_of_low_degree_train(ranks: Worlds, settings: dict[str, Any]) -> None:
    check(ranks, 4, Task({"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}), **settings)


def test_a_plan_in_a_few_words() -> None:
    assert PLAN.summary() == "degree 2 in 4 blocks; schedule merak, 3 sub-batches"
    assert MIXED.summary() == (
        "degree 4 in 1 block, 2 in 1, 1 in 1, 2 in 1, 2 of them not recomputed; schedule oases, 2 sub-batches; "
        "optimizer state owned once (keep); messages of 0.000488281 MiB"
    )


def sizes(settings: dict[str, Any], variables: dict[str, str]) -> tuple[int, int, str, int]:
    """On a rank: the size of the TMP world, the number of worlds, the schedule and its sub-batches."""
    os.environ.update(variables)
    state = converted(set_up(settings)[1])
    return state.mesh.tmp.size, state.mesh.data.size, state.plan.schedule, state.plan.sub_batches


@pytest.mark.parametrize(
    ("settings", "variables", "expected"),
    [
        ({}, {}, (4, 1, "oases", 2)),
        ({"degree": 2}, {}, (2, 2, "oases", 2)),
        ({}, {"OASES_TMP_SIZE": "2", "OASES_SCHEDULE": "megatron"}, (2, 2, "megatron", 1)),
        ({"tmp_size": 1}, {"OASES_TMP_SIZE": "2"}, (1, 4, "oases", 2)),
    ],
    ids=str,
)
def test_ranks_follow_from_the_settings(
    ranks: Worlds, settings: dict[str, Any], variables: dict[str, str], expected: tuple[int, int, str, int]
) -> None:
    assert ranks(4).run(sizes, settings, variables) == [expected] * 4


def message_bytes(settings: dict[str, Any]) -> list[int | None]:
    """On a rank: of the plan, of every block, and of what is outside of blocks."""
    state = converted(set_up(settings)[1])
    return [
        state.plan.message_bytes,
        *(link.message_bytes for link in state.stack.links),
        state.vocabulary.link.message_bytes,
    ]


def test_blocks_are_told_the_size_of_messages(ranks: Worlds) -> None:
    assert ranks(4).run(message_bytes, {"degree": 2, "message_mib": 1.5}) == [[3 * 2**19] * 5 + [None]] * 4
    assert ranks(4).run(message_bytes, {"plan": MIXED}) == [[512] * 5 + [None]] * 4
    assert ranks(4).run(message_bytes, {"degree": 2}) == [[None] * 6] * 4


def comm_dtypes(settings: dict[str, Any]) -> list[str | None]:
    """On a rank: of every block, and of what is outside of blocks."""
    state = converted(set_up(settings)[1])
    return [link.comm_dtype for link in (*state.stack.links, state.vocabulary.link)]


def test_blocks_that_send_are_told_in_which_type(ranks: Worlds) -> None:
    mixed = ["bf16", "bf16", None, "bf16", None]  # with a plan too: plans do not say
    assert ranks(4).run(comm_dtypes, {"plan": MIXED, "comm_dtype": "bf16"}) == [mixed] * 4
    assert ranks(4).run(comm_dtypes, {"plan": MIXED}) == [[None] * 5] * 4


def printed(settings: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        set_up(settings)
    return output.getvalue()


def test_rank_0_says_what_was_made_of_the_model(ranks: Worlds) -> None:
    line, *others = ranks(4).run(printed, {"degree": 2})
    assert others == [""] * 3
    assert re.fullmatch(
        r"oases: LlamaForCausalLM, 0\.0 M parameters, 98\.\d% of them sharded; degree 2 in 4 blocks; schedule oases, "
        r"2 sub-batches; 4 ranks = 2 data parallel × 2 TMP; link gloo\n",
        line,
    ), line
