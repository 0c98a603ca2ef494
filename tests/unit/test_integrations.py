"""What trainers of others cannot do under a plan is refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hzplan.errors import UserError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "load the best one afterwards"),
        ({"fp16": True}, "plans compute in fp32 or bf16"),
    ],
)
def test_arguments_that_no_plan_is_beside(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hzplan.integrations.trainer import PlannedTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for name, value in wrong.items():  # as given; on a CPU some are refused by Trainer's own arguments
        setattr(arguments, name, value)
    with pytest.raises(UserError, match=said):
        PlannedTrainer(nn.Linear(2, 2), arguments, plan="plan.json")


def test_a_plan_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hzplan.integrations.trainer import PlannedTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(UserError, match="no such file"):
        PlannedTrainer(nn.Linear(2, 2), arguments, plan=tmp_path / "none.json")
