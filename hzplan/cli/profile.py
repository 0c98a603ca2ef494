"""``hzplan profile``: measure a model's units and the links between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hzplan.errors import UserError

if TYPE_CHECKING:
    from hzplan.cli.console import Bar
    from hzplan.core.hierarchy import Mesh
    from hzplan.core.layout import Dtype
    from hzplan.formats.cluster import ClusterModel, DeviceModel
    from hzplan.formats.profile import Profile
    from hzplan.models.workload import Workload

Progress = Callable[[str, float], None]


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="gpt:<preset>, moe:<preset>, hf:<config> or module:factory."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path(
        "profile.json"
    ),
    nproc: Annotated[int | None, typer.Option(help="Ranks to start on this machine; by default 1.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence; by default the model's.")] = None,
    micro_batch: Annotated[str, typer.Option(help="Sequences per forward pass, sizes to measure.")] = "1,2,4",
    dtype: Annotated[
        str, typer.Option(help="What the model computes in: fp32, or bf16 with fp32 master weights.")
    ] = "fp32",
    optimizer: Annotated[
        str,
        typer.Option(help="adamw, adam, sgd, or muon: Muon for hidden matrices, AdamW for all others."),
    ] = "adamw",
    matrix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With muon: parameters, by name with wildcards, that are matrices beside those of two "
            "dimensions inside of repeated blocks; may be repeated.",
        ),
    ] = None,
    no_matrix: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With muon: parameters that are not; may be repeated."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Ranks per tier, fastest first, as in 8|16; by default found out.")
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS|NAME",
            help="A module's class, or name with wildcards, to shard as one; may be repeated. By default "
            "repeated blocks are found.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="links: measure the cluster's links, without a model.")
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(help="What --only links wrote on the cluster: the model is measured in one process."),
    ] = None,
    known: Annotated[
        list[Path] | None,
        typer.Option(
            help="A profile made here before: what it says of units of the same shapes is taken over; "
            "may be repeated."
        ),
    ] = None,
    analytic: Annotated[
        bool, typer.Option(help="Measure nothing: operations in shapes only, at a known cluster's rates.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A cluster in cost_models/, or a file like those, whose links are modelled: the model is "
            "measured here in one process, or with --analytic not at all."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="With --cluster: how many nodes.")] = None,
    kernels: Annotated[
        str,
        typer.Option(help="With --analytic: eager, or compiled where a compiler or hand fuses kernels."),
    ] = "eager",
    attention: Annotated[
        str | None,
        typer.Option(
            help="With --analytic: generation of attention's kernel, as in flash-3; by default the device's."
        ),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="With --analytic: what a recomputed unit computes again: full, attention, or operations."
        ),
    ] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure a model's units and the links between ranks, where they will really run.

    Inside a job that torchrun or srun started it measures there, else it starts --nproc ranks here. With
    --only links and later --links links are measured once for all models, and models on one device. With
    --cluster links are modelled, not measured, and with --analytic nothing is measured: any machine will do.
    The profile says so. Of a model that is too large for a device only distinct units are made. With --known
    another micro-batch size, or more layers of the same, costs only what is new.

    What is done is kept in PROFILE.partial until all is: the same command goes on where it was cut short.

    Example: hzplan profile gpt:tiny --nproc 4 -o profile.json
    """
    if only is not None:
        if only != "links" or model is not None or links is not None or analytic or known:
            raise UserError("--only links stands without MODEL, --links, --known and --analytic")
        _in_job(_LinksProfiling(_dtype(dtype), mesh, output), nproc, as_json=as_json)
        return
    if model is None:
        raise UserError(
            "MODEL is missing: name one, as in gpt:tiny, or measure links alone with --only links"
        )
    if cluster is None and (analytic or nodes is not None):
        from hzplan.formats.cluster import known_clusters

        raise UserError(
            f"--analytic and --nodes need --cluster NAME; clusters: {', '.join(known_clusters())}"
        )
    if cluster is not None and links is not None:
        raise UserError("--cluster has modelled links and --links measured ones; choose one")
    if (cluster is not None or links is not None) and nproc not in (None, 1):
        raise UserError("--nproc is for ranks that measure together; leave it out here")
    model_here = _ModelProfiling(
        *(model, seq_len, _micro_batches(micro_batch), _dtype(dtype), optimizer, mesh, output),
        units=tuple(unit or ()),
        known=tuple(known or ()),
        matrices=_matrices(optimizer, matrix or (), no_matrix or ()),
        how_modelled=_how_modelled(kernels, attention, recompute, analytic=analytic),
    )
    if known and analytic:
        raise UserError("--analytic measures nothing, so there is nothing to take from --known; choose one")
    if cluster is not None:
        made = model_here.analyse if analytic else model_here.for_cluster
        _in_this_process(lambda bar: made(cluster, nodes, bar.update), model_here, as_json=as_json)
    elif links is not None:
        if mesh is not None:
            raise UserError("--links says which ranks there are; leave --mesh out")
        _in_this_process(lambda bar: model_here.with_links(links, bar.update), model_here, as_json=as_json)
    else:
        _in_job(model_here, nproc, as_json=as_json)


def _in_this_process(work: Callable[[Bar], Profile], request: _ModelProfiling, *, as_json: bool) -> None:
    """Make a profile here, and show it; UserError in a job, where every rank would."""
    from hzplan.cli import console, ranks
    from hzplan.cli.profile_tables import show

    here = ranks.this_rank(None)
    if here is not None and here.world > 1:
        raise UserError(f"this is one process's work, and here are {here.world} ranks; start it without them")
    with console.Bar("profile") as bar:
        profile = work(bar)
    profile.save(request.output)
    request.say_length(profile)
    show(profile, request.output, as_json=as_json)


def _in_job(request: _ModelProfiling | _LinksProfiling, nproc: int | None, *, as_json: bool) -> None:
    """Measure on every rank of this job, or of one that is started here."""
    from hzplan.cli import console, ranks
    from hzplan.launch import job

    here = ranks.this_rank(nproc)
    world = here.world if here else nproc or 1
    request.check(world)
    if here is None:  # what is wrong is said before ranks start
        request.ready()
        ranks.start_here(world)
        return
    with job.join(here) as joined:
        ready: Any = joined.agree(lambda: request.ready(writes=here.rank == 0))
        if here.rank == 0:
            ranks.say_how_on_a_cluster(here)
        with console.Bar("profile", shown=here.rank == 0) as bar:
            show = request.measure(ready, bar.update)
        if here.rank == 0:
            show(as_json)


@dataclass(frozen=True)
class _LinksProfiling:
    """To measure a cluster's links without a model."""

    dtype: Dtype
    mesh: str | None
    output: Path

    def check(self, world: int) -> None:
        """UserError for a mesh of another world."""
        _mesh(self.mesh, world)

    def ready(self, *, writes: bool = True) -> None:
        """UserError when the links cannot be written."""
        from hzplan.cli.paths import check_writable

        if writes:
            check_writable(self.output)

    def measure(self, _: object, progress: Progress) -> Callable[[bool], None]:
        """On every rank of the job; returns what writes and shows the result."""
        from hzplan.cli.console import remark
        from hzplan.cli.profile_tables import show_links
        from hzplan.profiler import measure_links_alone

        mesh, names = _tiers(self.mesh)
        found = measure_links_alone(
            mesh=mesh, tier_names=names, dtype=self.dtype, progress=progress, message=remark
        )

        def write(as_json: bool) -> None:
            found.save(self.output)
            show_links(found, self.output, as_json=as_json)

        return write


@dataclass(frozen=True)
class _ModelProfiling:
    """To profile a model: where it will run, with links measured before, or in shapes only."""

    model: str
    seq_len: int | None
    micro_batches: tuple[int, ...]
    dtype: Dtype
    optimizer: str
    mesh: str | None
    output: Path
    units: tuple[str, ...] = ()
    known: tuple[Path, ...] = ()
    how_modelled: tuple[tuple[str, str], ...] = ()
    matrices: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def check(self, world: int) -> None:
        """UserError for a mesh of another world."""
        _mesh(self.mesh, world)

    def ready(self, *, writes: bool = True) -> Workload:
        """The model; UserError when it cannot be had or measured, or the profile not be written."""
        from hzplan.cli.paths import check_writable
        from hzplan.models.matrices import MatrixRule
        from hzplan.models.workload import load
        from hzplan.profiler.model.optimizer import OPTIMIZERS

        if writes:
            check_writable(self.output)
        self.read_known()
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"--optimizer {self.optimizer} is not known; use {', '.join(OPTIMIZERS)}")
        rule = None if self.matrices is None else MatrixRule(*self.matrices)
        return replace(load(self.model, seq_len=self.seq_len), units=self.units, matrices=rule)

    @property
    def how(self) -> dict[str, Any]:
        """What every way of profiling is told."""
        return {"micro_batches": self.micro_batches, "dtype": self.dtype, "optimizer": self.optimizer}

    def read_known(self) -> dict[str, Profile]:
        """The profiles to take from, by their paths."""
        from hzplan.formats.profile import Profile

        return {str(path): Profile.load(path) for path in self.known}

    def measure(self, workload: Workload, progress: Progress) -> Callable[[bool], None]:
        """On every rank of the job; returns what writes and shows the result."""
        from hzplan.cli.console import remark
        from hzplan.cli.profile_tables import show
        from hzplan.profiler import measure

        mesh, names = _tiers(self.mesh)
        partial_path = self.output.with_name(f"{self.output.name}.partial")
        profile = measure(
            workload,
            mesh=mesh,
            tier_names=names,
            progress=progress,
            partial_path=partial_path,
            message=remark,
            earlier=self.read_known(),
            **self.how,
        )

        def write(as_json: bool) -> None:
            profile.save(self.output)
            partial_path.unlink(missing_ok=True)
            self.say_length(profile)
            show(profile, self.output, as_json=as_json)

        return write

    def say_length(self, profile: Profile) -> None:
        """Say how long sequences are where that was not asked for and the model does not decide it."""
        from hzplan.cli.console import remark

        if self.seq_len is None and self.model.startswith("hf:"):
            length = profile.model.seq_len
            remark(f"{self.model}: sequences of {length} tokens; --seq-len takes another length")

    def with_links(self, path: Path, progress: Progress) -> Profile:
        """Measured in this process, for the cluster that the links are of."""
        from hzplan.cli.console import remark
        from hzplan.formats.links import Links
        from hzplan.profiler import measure_with

        links = Links.load(path)
        return measure_with(
            links, self.ready(), progress=progress, earlier=self.read_known(), message=remark, **self.how
        )

    def for_cluster(self, name: str, nodes: int | None, progress: Progress) -> Profile:
        """Measured in this process, for a cluster that is known by name or file."""
        from hzplan.cli.console import remark
        from hzplan.profiler.analytic import measure_for

        cluster, device, mesh = self._cluster(name, nodes)
        earlier = self.read_known()
        return measure_for(
            *(cluster, device, self.ready()),
            mesh=mesh,
            progress=progress,
            earlier=earlier,
            message=remark,
            **self.how,
        )

    def analyse(self, name: str, nodes: int | None, progress: Progress) -> Profile:
        """In shapes only, at the rates of a cluster that is known by name or file."""
        import torch

        from hzplan.profiler.analytic import analyse

        cluster, device, mesh = self._cluster(name, nodes)
        with torch.device("meta"):  # looking at a factory's model must not take memory either
            workload = self.ready()
        how: dict[str, Any] = {**self.how, **dict(self.how_modelled)}
        return analyse(workload, cluster, device, mesh=mesh, progress=progress, **how)

    def _cluster(self, name: str, nodes: int | None) -> tuple[ClusterModel, DeviceModel, Mesh]:
        """A cluster that is known by name or file, with so many nodes."""
        from hzplan.cli.console import remark
        from hzplan.core.hierarchy import Mesh
        from hzplan.cost.collectives import MOST_NODES
        from hzplan.formats.cluster import find_cluster
        from hzplan.formats.topology import is_topology, load_topology

        if is_topology(name):
            if nodes is not None:
                raise UserError(f"--nodes {nodes}: {name} says how many nodes there are; leave it out")
            cluster, device = load_topology(Path(name))
            remark(f"{cluster.name}: {cluster.about}")
        else:
            cluster, device = find_cluster(name)
        if nodes is not None and not 1 <= nodes <= MOST_NODES:
            raise UserError(f"--nodes {nodes}: a cluster has at least 1 node, and at most {MOST_NODES}")
        if self.mesh is not None and nodes is not None:
            raise UserError("--mesh says how many nodes there are; leave --nodes out")
        sizes = [tier.ranks for tier in cluster.tiers]
        mesh = _parsed(self.mesh) if self.mesh else Mesh.of_tiers(*sizes[:-1], nodes or sizes[-1])
        return cluster, device, mesh


def _how_modelled(
    kernels: str, attention: str | None, recompute: str, *, analytic: bool
) -> tuple[tuple[str, str], ...]:
    """The options that only --analytic knows; UserError for a value that does not exist, or without it."""
    if not analytic:
        if (kernels, attention, recompute) != ("eager", None, "full"):
            raise UserError(
                "--kernels, --attention and --recompute are for --analytic; what runs is measured"
            )
        return ()
    from hzplan.profiler.model.kernels import KERNELS
    from hzplan.profiler.model.selective import RECOMPUTE

    for name, value, known in (("kernels", kernels, KERNELS), ("recompute", recompute, RECOMPUTE)):
        if value not in known:
            raise UserError(f"--{name} {value} is not known; use {', '.join(known)}")
    found = [("kernels", kernels), ("recompute", recompute)]
    return (*found, *([("attention", attention)] if attention is not None else []))


def _matrices(
    optimizer: str, more: Sequence[str], without: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """What --matrix and --no-matrix say; UserError without an optimizer that has matrices."""
    if not more and not without:
        return None
    if optimizer != "muon":
        raise UserError(f"--matrix and --no-matrix are for --optimizer muon, not {optimizer}")
    return tuple(more), tuple(without)


def _micro_batches(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise UserError(f"--micro-batch {text}: write sizes of at least 1 with commas between, as in 1,2,4")
    return tuple(sizes)


def _dtype(text: str) -> Dtype:
    from hzplan.cli.quantities import parse_dtype

    if text == "fp16":
        raise UserError("--dtype fp16 is not supported: it needs loss scaling; use bf16 or fp32")
    return parse_dtype(text, "--dtype")


def _mesh(text: str | None, world: int) -> Mesh | None:
    """The mesh that was given; UserError when it is not of so many ranks."""
    mesh = _parsed(text) if text is not None else None
    if mesh is not None and mesh.world != world:
        raise UserError(
            f"--mesh {text} has {mesh.world} ranks, this job has {world}; give --nproc {mesh.world}"
        )
    return mesh


def _tiers(text: str | None) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that was given or found, and its tiers' names."""
    from hzplan.profiler import default_mesh

    if text is None:
        return default_mesh()
    mesh = _parsed(text)
    return mesh, _tier_names(len(mesh.tiers))


def _parsed(text: str) -> Mesh:
    from hzplan.core.hierarchy import Mesh

    try:
        return Mesh.parse(text)
    except ValueError as error:
        raise UserError(f"--mesh: {error}") from None


def _tier_names(tiers: int) -> tuple[str, ...]:
    """Names for the tiers of a mesh that the user gave, as ``default_mesh`` has them."""
    if tiers <= 2:
        return ("node", "network")[:tiers]
    return ("node", *(f"network {number}" for number in range(1, tiers)))
