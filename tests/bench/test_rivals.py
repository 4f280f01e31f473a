"""Other libraries' layers: where their weights lie, what they compute, and what is said where they are missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from oases_hf.launching import FAIL, PASS
from scripts.bench import gpu
from scripts.bench.contenders import Work, hugging_face
from scripts.bench.gpu import main
from scripts.bench.rivals import Attention, Rival, Stack, angles, gated, imported, places, rotated
from scripts.bench.rows import Row, read_json
from scripts.bench.schedules import check_alike, compared
from scripts.bench.tasks import OUT_OF_MEMORY, Entry, Job, entries
from scripts.bench.timing import World

from .test_gpu_bench import TINY

HEADS, SEQ, BATCH = 4, 8, 2
CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=99, use_cache=False
)
WORK = Work(CONFIG, torch.float64, BATCH, SEQ, torch.device("cpu"))


class Layer(nn.Module):
    """A LLaMA layer whose queries, keys and values are one matrix, as gate and up are."""

    def __init__(self) -> None:
        super().__init__()
        hidden, ffn = CONFIG.hidden_size, CONFIG.intermediate_size
        self.input_layernorm, self.norm = (nn.RMSNorm(hidden, CONFIG.rms_norm_eps) for _ in range(2))
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.first, self.second = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)
        self.attention = Attention()

    def forward(self, hidden_SBH: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        qkv: Tensor = self.qkv(self.input_layernorm(hidden_SBH))
        query, key, value = qkv.view(SEQ, BATCH, HEADS, -1).chunk(3, -1)
        query, key = (rotated(each.permute(1, 2, 0, 3), turns).permute(2, 0, 1, 3) for each in (query, key))
        hidden_SBH = hidden_SBH + self.projection(self.attention(query, key, value, None))
        output: Tensor = hidden_SBH + self.second(gated(self.first(self.norm(hidden_SBH))))
        return output


class Block(nn.Module):
    """As libraries have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden_SBH: Tensor, attention_mask: None, rotary_pos_emb: tuple[Tensor, Tensor]) -> Tensor:
        for layer in self.layers:
            hidden_SBH = layer(hidden_SBH, rotary_pos_emb)
        return hidden_SBH


def rival(world: World) -> Rival:
    model = WORK.model()
    assert isinstance(model, LlamaModel)
    turns = angles(model, WORK)
    stack = Stack(Block().double(), (turns.cos().double(), turns.sin().double()))
    where = places("qkv", "projection", "first", "second", "norm", HEADS)
    return Rival("rival", "", model, stack, where, WORK, world)


def test_fused_layers_compute_what_the_models_do() -> None:
    world = World(0, 1, WORK.device, None)
    contenders = [hugging_face(WORK, world, 1), rival(world)]
    contenders[0].recompute = "none"
    shapes = compared(WORK.shapes())
    assert len(shapes) == 2 + 2 * 9
    check_alike(contenders, shapes, 1e-5)
    contenders[1].model.get_parameter("layers.0.block.layers.1.first.weight").data.mul_(1.01)
    with pytest.raises(ArithmeticError, match=r"^rival: the gradient of .* off that of hf"):
        check_alike(contenders, shapes, 1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_the_whole(ranks: int) -> None:
    model = WORK.model()
    where = places("qkv", "projection", "first", "second", "norm", HEADS // ranks)
    whole = {name: model.get_parameter(f"layers.0.{name}.weight").detach() for name in where}
    hidden, ffn = CONFIG.hidden_size, CONFIG.intermediate_size
    shapes = {
        "input_layernorm": (hidden,),
        "norm": (hidden,),
        "qkv": (3 * hidden // ranks, hidden),
        "projection": (hidden, hidden // ranks),
        "first": (2 * ffn // ranks, hidden),
        "second": (hidden, ffn // ranks),
    }
    held = [{name: torch.full(shape, torch.nan).double() for name, shape in shapes.items()} for _ in range(ranks)]
    for name, place in where.items():
        for rank in range(ranks):
            place.put(held[rank][place.name], whole[name], rank, ranks)
    assert not any(tensor.isnan().any() for each in held for tensor in each.values())
    for name, place in where.items():
        assert torch.equal(place.whole([each[place.name] for each in held]), whole[name]), name
    rows = held[-1]["qkv"].view(HEADS // ranks, 3, -1, hidden)[-1]
    last = [whole[f"self_attn.{each}_proj"][-hidden // HEADS :] for each in "qkv"]
    assert all(map(torch.equal, rows, last)), "queries, keys and values of the last head"


def test_entries_are_of_layers_alone() -> None:
    names = ["megatron-core", "domino"]
    assert list(entries(names, "layers", "bf16")) == [Entry(names[0]), Entry(names[0], "none"), Entry(names[1], "none")]
    assert not list(entries(names, "whole", "bf16"))


@pytest.mark.dist
def test_what_is_not_installed_has_rows_that_say_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("megatron", "deepspeed"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('nothing here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    file = tmp_path / "rows.json"
    code = main([*TINY, "--rounds=1", "--regimes=no-p2p-fp32", "--names=megatron-core,domino", f"--json={file}"])
    out, err = capfd.readouterr()
    assert code == PASS, out + err
    assert [(row.name, row.recompute, row.failure) for row in read_json(file)] == [
        ("megatron-core", "full", "megatron-core is not installed: nothing here"),
        ("megatron-core", "none", "megatron-core is not installed: nothing here"),
        ("domino", "none", "deepspeed is not installed: nothing here"),
    ]
    assert out.count("deepspeed is not installed") == 2, "as it goes, and in the table"


@pytest.mark.parametrize(
    ("failure", "code"), [("", PASS), (OUT_OF_MEMORY, PASS), ("x is not installed: y", PASS), ("ValueError: z", FAIL)]
)
def test_exit_code(failure: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def done(job: Job, command: object, ranks: int) -> None:
        job.add(Row("megatron", "", None if failure else 1.0, failure=failure))

    monkeypatch.setattr(gpu, "run_job", done)
    assert main([*TINY, "--regimes=no-p2p-fp32", "--parts=layers"]) == code


def test_modules_that_are_there_are_imported() -> None:
    assert imported("this project", "json", "math") == [__import__("json"), __import__("math")]
