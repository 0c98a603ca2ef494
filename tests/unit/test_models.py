"""The built-in GPT, and the ways to name a model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hzplan.errors import CheckFailed, JobFailed, NoPlanFits, UserError, one_line
from hzplan.models.gpt import GPT, PRESETS, GPTConfig, closed_form_forward_flops, closed_form_parameters
from hzplan.models.workload import load

NANO = PRESETS["nano"]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_user_error_is_one_line_with_its_exit_code() -> None:
    assert str(UserError("a.json:\n  broken")) == "a.json: broken"
    assert [kind.exit_code for kind in (CheckFailed, UserError, NoPlanFits, JobFailed)] == [1, 2, 3, 4]
    assert one_line(ValueError("two\nlines")) == "ValueError: two lines"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 1000))) < 250


def test_a_later_token_does_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    model = GPT(NANO)
    tokens = torch.randint(NANO.vocab, (2, NANO.seq_len))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % NANO.vocab
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, NANO.seq_len, NANO.vocab)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    for position in (20, 21, NANO.seq_len - 1):  # and it does reach every later one
        assert (before[:, position] - after[:, position]).abs().max() > 1e-4


def test_attention_tells_orders_of_the_same_tokens_apart() -> None:
    torch.manual_seed(0)
    model = GPT(NANO)
    with torch.no_grad():
        assert not torch.allclose(
            model(torch.tensor([[1, 2, 3]]))[:, -1], model(torch.tensor([[2, 1, 3]]))[:, -1]
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape", [NANO, GPTConfig(vocab=50, layers=3, width=24, heads=4, seq_len=7, mlp_ratio=3)]
)
def test_closed_form_parameters(shape: GPTConfig, tied: bool) -> None:
    config = replace(shape, tied=tied)
    assert count(GPT(config)) == closed_form_parameters(config)


def test_presets_have_the_sizes_of_their_names() -> None:
    millions = {name: closed_form_parameters(config) / 1e6 for name, config in PRESETS.items()}
    assert millions["medium"] == pytest.approx(124.4, abs=0.1)
    assert millions["small"] == pytest.approx(25.5, abs=0.2)
    assert millions["1.3b"] == pytest.approx(1300, rel=0.03)
    assert 6000 < millions["7b"] < 7500
    with torch.device("meta"):
        assert count(GPT(PRESETS["7b"])) == closed_form_parameters(PRESETS["7b"])


def test_closed_form_flops_are_what_torch_counts() -> None:
    with torch.device("meta"):  # where attention is not fused away from the counter
        model, tokens = GPT(NANO), torch.zeros(3, NANO.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    assert counter.get_total_flops() == closed_form_forward_flops(NANO, 3)


def test_a_tied_weight_is_one_parameter() -> None:
    tied, untied = GPT(NANO), GPT(replace(NANO, tied=False))
    assert tied.head.weight is tied.embed.weight
    assert not any(parameter.is_meta for parameter in tied.parameters())
    assert untied.head.weight is not untied.embed.weight
    tied(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert tied.embed.weight.grad is not None
    # Tokens that the input never saw have gradients through the head alone.
    assert tied.embed.weight.grad[1:].abs().sum() > 0


def test_initial_deviations() -> None:
    torch.manual_seed(0)
    config = PRESETS["tiny"]
    model = GPT(config)
    block = model.layers[0]
    assert isinstance(block, nn.Module)
    weights = dict(block.named_parameters())
    assert weights["attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for name in ("attention.out.weight", "mlp.down.weight"):
        assert weights[name].std().item() == pytest.approx(0.02 / math.sqrt(2 * config.layers), rel=0.05)
    assert torch.equal(weights["norm1.weight"], torch.ones(config.width))
    assert not weights["mlp.up.bias"].any()


def test_impossible_shapes_and_too_long_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of heads"):
        replace(NANO, heads=3)
    with pytest.raises(ValueError, match="layers must be at least 1"):
        replace(NANO, layers=0)
    with pytest.raises(ValueError, match="33 tokens"):
        GPT(NANO)(torch.zeros(1, 33, dtype=torch.int64))


def test_a_preset_is_a_workload() -> None:
    workload = load("gpt:nano")
    assert (workload.name, workload.seq_len, workload.vocab) == ("gpt:nano", 32, 256)
    batch = workload.batch(3, torch.Generator().manual_seed(1))
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (3, 33) and batch.dtype == torch.int64
    torch.manual_seed(5)
    first = workload.build()
    torch.manual_seed(5)
    second = workload.build()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    loss = workload.loss(first, batch)
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)  # an untrained model knows nothing
    expected = [
        -first(batch[:, :-1]).log_softmax(-1)[row, at, batch[row, at + 1]]
        for row in range(3)
        for at in range(32)
    ]
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    assert workload.loss(first.double(), batch).dtype == torch.float64
    assert workload.loss(first.bfloat16(), batch).dtype == torch.float32


def test_seq_len_is_the_users() -> None:
    workload = load("gpt:nano", seq_len=8)
    batch = workload.batch(1, torch.Generator())
    assert isinstance(batch, torch.Tensor)
    assert workload.seq_len == 8 and batch.shape == (1, 9)
    model = workload.build()
    assert isinstance(model, GPT) and model.config.seq_len == 8


MODULE = """
from types import SimpleNamespace
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab=11):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)
    def forward(self, tokens):
        return self.table(tokens)

def plain():
    return Bigram()

def full():
    return SimpleNamespace(
        model=Bigram(), seq_len=5, vocab=7,
        batch=lambda n, generator: torch.full((n, 6), 2),
        loss=lambda model, batch: model(batch).sum() * 0 + 42,
    )

def sized():
    return SimpleNamespace(model=Bigram(), seq_len=5, vocab=7)

def fails():
    raise RuntimeError("no\\nweights")

def exits():
    raise SystemExit("bye")

def number():
    return 3

def bad_vocab():
    return SimpleNamespace(model=Bigram(), vocab="many")

def bad_batch():
    return SimpleNamespace(model=Bigram(), batch=3)

def no_vocab():
    return nn.Linear(2, 2)

nothing = None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package `their`, made the current one."""
    package = tmp_path / "their"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "code.py").write_text(MODULE)
    (package / "broken.py").write_text("def f(:\n")
    (package / "needy.py").write_text("import a_package_nobody_has\n")
    (package / "script.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "their"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_a_factory_of_a_plain_module() -> None:
    random_state = torch.get_rng_state()
    workload = load("their.code:plain")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (workload.vocab, workload.seq_len) == (11, 128)
    assert load("their.code:plain", seq_len=9).seq_len == 9
    batch = workload.batch(2, torch.Generator())
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (2, 129) and batch.max() < 11
    torch.manual_seed(3)
    model = workload.build()
    assert workload.loss(model, batch).item() > 0
    other = workload.build()
    assert other is not model
    torch.manual_seed(3)
    assert torch.equal(next(workload.build().parameters()), next(model.parameters()))


@pytest.mark.usefixtures("here")
def test_a_factory_of_an_object() -> None:
    workload = load("their.code:full")
    assert (workload.vocab, workload.seq_len) == (7, 5)
    batch = workload.batch(3, torch.Generator())
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch, torch.full((3, 6), 2))
    assert workload.loss(workload.build(), batch).item() == 42
    assert load("their.code:full", seq_len=5).seq_len == 5
    assert load("their.code:sized").seq_len == 5
    batch = load("their.code:sized", seq_len=4).batch(100, torch.Generator())
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (100, 5) and batch.max() == 6


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("spec", "seq_len", "says"),
    [
        ("gpt:huge", None, "the presets are gpt:nano, gpt:tiny"),
        ("gpt:nano", 0, "at least 1 token"),
        ("hf:gpt2", None, "no such file; use a config.json"),
        ("moe:huge", None, "no such preset; the presets are moe:nano, moe:tiny"),
        ("", None, "not a model"),
        ("gpt", None, "not a model"),
        ("./train.py", None, "not a model"),
        ("their.code:", None, "not a model"),
        ("nowhere_at_all:f", None, "no module `nowhere_at_all`"),
        ("their.nowhere:f", None, "no module `their.nowhere`"),
        ("their.needy:f", None, "a_package_nobody_has"),
        ("their.broken:f", None, "SyntaxError"),
        ("their.script:f", None, "SystemExit"),
        ("their.code:missing", None, "has no `missing`"),
        ("their.code:nothing", None, "not a function"),
        ("their.code:fails", None, "RuntimeError: no weights"),
        ("their.code:exits", None, "SystemExit: bye"),
        ("their.code:number", None, "returned a int"),
        ("their.code:Bigram.forward", None, "TypeError"),
        ("their.code:bad_vocab", None, "`vocab` must be a positive integer"),
        ("their.code:bad_batch", None, "`batch` must be a function"),
        ("their.code:no_vocab", None, "no batches without a vocabulary"),
        ("their.code:full", 6, "its own batches"),
    ],
)
def test_what_is_no_model_is_one_line(spec: str, seq_len: int | None, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load(spec, seq_len=seq_len)
    message = str(caught.value)
    assert says in message and "\n" not in message
    assert spec in message or seq_len == 0
    assert caught.value.exit_code == 2


@pytest.mark.usefixtures("here")
def test_a_factory_that_stops_working_is_still_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = load("their.code:plain")

    def broken(*_: object) -> Callable[..., None]:
        raise OSError("disk gone")

    monkeypatch.setattr(sys.modules["their.code"], "Bigram", broken)
    with pytest.raises(UserError, match="disk gone"):
        workload.build()
