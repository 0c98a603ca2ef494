"""DeepSpeed's ZeRO, in processes of its own: it changes much of the process it lives in.

Every rank starts a child, and the children form a job of their own; rank and child talk in lines of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from hzplan.errors import JobFailed
from hzplan.launch.job import TIMEOUT_S, end_with_parent, meeting_point, rank_info
from hzplan.models.workload import load
from hzplan.peers.contender import NotHere, Setting, Trainer, Turn
from hzplan.profiler.session.ranks import Ranks
from hzplan.training.batches import batches, corpus_of
from hzplan.training.step import on_device

GRACE_S = 30.0
"""How long a child may take to end."""

REDUCE_BUCKET_ELEMENTS = {"cpu": 1_000_000, "cuda": 500_000_000}
"""On CPUs small enough that backward overlaps with communication in small models too; on GPUs its default.
NOT RUN ON A GPU YET."""

MOST_PREFETCHED_ELEMENTS = 50_000_000
"""Its default for stage 3."""


class DeepSpeed:
    """A contender in a child process."""

    def __init__(self, setting: Setting, stage: int) -> None:
        missing = Ranks.here().gather(importlib.util.find_spec("deepspeed") is None)
        if any(missing):  # on all ranks alike, or some would wait for the others
            where = f" on rank {missing.index(True)}" if not all(missing) else ""
            raise NotHere(f"DeepSpeed is not installed{where}; pip install deepspeed")
        self.name = f"deepspeed{stage}"
        self._log = tempfile.TemporaryFile(mode="w+", prefix="hzplan-deepspeed-")  # noqa: SIM115
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()  # of this process, beside which the child's memory must fit
        environment = os.environ | _place(setting)
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        ours, theirs = os.pipe(), os.pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "hzplan.peers.deepspeed", str(ours[0]), str(theirs[1])],
            env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(ours[0], theirs[1]),
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._back = os.fdopen(ours[1], "w"), os.fdopen(theirs[0])
        answer = self._ask(
            {
                "stage": stage,
                "plan": setting.plan.model_dump_json(),
                "model": setting.workload.name,
                "data": None if setting.text is None else str(setting.text),
                "lr": setting.lr,
                "seed": setting.seed,
            }
        )
        self.peak_memory_bytes = int(answer["peak_memory_bytes"])

    def turn(self, first: int, steps: int) -> Turn:
        """See ``Contender``."""
        answer = self._ask({"first": first, "steps": steps})
        return Turn(answer["losses"], answer["seconds"], {}, answer["processor_s"])

    def close(self) -> None:
        """The child ends when nobody will ask any more."""
        with suppress(OSError):
            self._to.close()
        try:
            self._child.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._back.close()
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._to.write(json.dumps(question) + "\n")
            self._to.flush()
            answer = self._back.readline()
        except OSError:
            answer = ""
        if not answer:
            self._log.seek(0)
            said = [line.strip() for line in self._log if line.strip()] or ["nothing"]
            raise JobFailed(f"{self.name} ended; its last words: {said[-1][:300]}")
        return dict(json.loads(answer))


def _place(setting: Setting) -> dict[str, str]:
    """Where the children meet: a port that is free on rank 0's host."""
    host, _ = meeting_point()
    with socket.socket() as free:
        free.bind(("", 0))
        port = Ranks.here().share(free.getsockname()[1])
    here = rank_info()
    local = {} if here is None else {"LOCAL_RANK": str(here.local_rank), "LOCAL_SIZE": str(here.local_world)}
    if setting.device.index is not None:  # where every rank sees one GPU only, it has another number
        local["LOCAL_RANK"] = str(setting.device.index)
    return {
        **local,
        "RANK": str(setting.rank),
        "WORLD_SIZE": str(setting.world),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": setting.device.type,
    }


class _Engine(Trainer):
    """The child's side: DeepSpeed's engine as a trainer."""

    def __init__(self, setting: Setting, stage: int) -> None:
        self.stage = stage
        super().__init__(setting)

    def prepare(self) -> None:
        import deepspeed

        setting = self.setting
        model = setting.build_model()
        made, arguments = setting.optimizer_class()
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=made(model.parameters(), **arguments), config=self.configuration()
        )
        self.model = self.engine

    def configuration(self) -> dict[str, Any]:
        """What DeepSpeed reads from its file."""
        setting = self.setting
        bucket = REDUCE_BUCKET_ELEMENTS[setting.device.type]
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self.stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": min(bucket, MOST_PREFETCHED_ELEMENTS),
            }
        # As the plan's, by DeepSpeed's names; its own default is the compute dtype.
        travelling = {torch.float32: "fp32", torch.bfloat16: "bf16"}[setting.reduce_dtype]
        return {
            "communication_data_type": travelling,
            "data_types": {"grad_accum_dtype": "fp32"},
            "train_micro_batch_size_per_gpu": setting.plan.batch.micro_batch,
            "gradient_accumulation_steps": setting.accumulation,
            "gradient_clipping": setting.clip_norm if setting.plan.clip else 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": setting.bf16},
            "steps_per_print": sys.maxsize,
            "wall_clock_breakdown": False,
        }

    def step(self, step: int) -> float:
        setting = self.setting
        self.seed(step)
        total = torch.zeros((), dtype=torch.float64, device=setting.device)
        for index in range(setting.accumulation):
            batch = setting.data.train(step, index, setting.rank)
            loss = setting.workload.loss(self.engine, on_device(batch, setting.device))
            self.engine.backward(loss)  # which divides by the accumulation itself
            self.engine.step()
            total += loss.detach().double()  # waited for once, as by the others
        return float(total) / setting.accumulation


def _child(questions: IO[str], answers: IO[str]) -> None:
    """Make the engine from the first line, then answer one turn per line until there are no more."""
    from hzplan.formats.plan import Plan

    end_with_parent()
    asked = json.loads(questions.readline())
    on_gpu = os.environ["DS_ACCELERATOR"] == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    plan = Plan.model_validate_json(asked["plan"])
    workload = load(asked["model"], seq_len=plan.model.seq_len)
    text = None if asked["data"] is None else Path(asked["data"])
    data = batches(workload, corpus_of(text, workload), plan, seed=asked["seed"])
    engine = _Engine(
        Setting(plan, workload, data, lr=asked["lr"], seed=asked["seed"], text=text), asked["stage"]
    )

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"peak_memory_bytes": engine.peak_memory_bytes})
    for line in questions:
        wanted = json.loads(line)
        answer(asdict(engine.turn(wanted["first"], wanted["steps"])))


if __name__ == "__main__":
    _child(os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w"))
