"""torch.compile of units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hzplan import parallelize
from hzplan.errors import UserError
from hzplan.models.workload import load
from tests.distributed.ranks import on_ranks
from tests.plans import make_plan


@pytest.mark.distributed
def test_compiled_units_train_as_one_process_would(tmp_path: Path) -> None:
    """Graphs are made by torch.compile; inductor's code for them takes a minute more and changes nothing."""
    payload = {"levels": [[1, 1, 1], [0, 1, 1], [0, 0, 1]], "backend": "aot_eager"}
    errors = on_ranks(2, "tests.distributed.compiled:differences", payload, tmp_path)
    assert len(errors) == 3 and max(errors) < 1e-12


def test_a_module_wrapped_by_torch_compile_is_refused() -> None:
    model = load("gpt:nano").build()
    layers = model.get_submodule("layers")
    layers[1] = torch.compile(layers[1], backend="eager")
    with pytest.raises(UserError, match=r"layers\.1 is wrapped by torch\.compile.*in place"):
        parallelize(model, make_plan("gpt:nano", mesh="1"))
