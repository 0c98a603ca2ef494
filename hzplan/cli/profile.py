"""``hzplan profile``: measure a model's units and the links between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hzplan.errors import UserError

if TYPE_CHECKING:
    from hzplan.formats.profile import Profile
    from hzplan.hierarchy import Mesh
    from hzplan.layout import Dtype
    from hzplan.models.workload import Workload


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="gpt:<preset>, hf:<config>, or package.module:factory."),
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
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    mesh: Annotated[
        str | None, typer.Option(help="Ranks per tier, fastest first, as in 8|16; by default found out.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="links: measure the cluster's links, without a model.")
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(help="What --only links wrote on the cluster: the model is measured in one process."),
    ] = None,
    analytic: Annotated[
        bool, typer.Option(help="Without a cluster: operations in shapes only, at a known cluster's rates.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="With --analytic: a cluster in cost_models/, or a file like those.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="With --analytic: how many nodes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure a model's units and the links between ranks, where they will really run.

    Inside a job that torchrun or srun started it measures there, else it starts --nproc ranks here. With
    --analytic nothing is measured: any machine will do, and the profile says that it is modelled. With --only
    links and later --links links are measured once for all models, and models on one device.

    Example: hzplan profile gpt:tiny --nproc 4 -o profile.json
    """
    from hzplan.cli import ranks

    if only is not None:
        if only != "links" or model is not None or links is not None or analytic:
            raise UserError("--only links stands without MODEL, --links and --analytic")
        _links_alone(_dtype(dtype), mesh, nproc, output, as_json=as_json)
        return
    if model is None:
        raise UserError(
            "MODEL is missing: name one, as in gpt:tiny, or measure links alone with --only links"
        )
    if analytic or cluster is not None or nodes is not None:
        if nproc is not None or not analytic or cluster is None:
            raise UserError(
                "--analytic, --cluster NAME and, if wanted, --nodes go together, without --nproc; clusters: "
                + ", ".join(_known_clusters())
            )
        _without_a_cluster(
            _Request(model, seq_len, _micro_batches(micro_batch), _dtype(dtype), optimizer, None, output),
            cluster,
            nodes,
            mesh,
            as_json=as_json,
        )
        return
    if links is not None:
        if nproc not in (None, 1) or mesh is not None:
            raise UserError("--links says which ranks there are; leave --nproc and --mesh out")
        request = _Request(
            model, seq_len, _micro_batches(micro_batch), _dtype(dtype), optimizer, None, output
        )
        _with_links(request, links, as_json=as_json)
        return
    here = ranks.this_rank(nproc)
    world = here.world if here else nproc or 1
    request = _Request(
        model, seq_len, _micro_batches(micro_batch), _dtype(dtype), optimizer, _mesh(mesh, world), output
    )
    if here is None:  # what is wrong is said before ranks start
        request.workload()
        ranks.start_here(world)
        return

    from hzplan import job
    from hzplan.cli import console
    from hzplan.cli.profile_tables import show

    with job.join(here) as joined:
        workload = joined.agree(lambda: request.workload(writes=here.rank == 0))
        if here.rank == 0:
            ranks.say_how_on_a_cluster(here)
        with console.Bar("profile", shown=here.rank == 0) as bar:
            profile = request.measure(workload, bar.update)
        if here.rank == 0:
            profile.save(output)
            show(profile, output, as_json=as_json)


def _known_clusters() -> list[str]:
    from hzplan.formats.cluster import known_clusters

    return known_clusters()


def _links_alone(
    dtype: Dtype, mesh_text: str | None, nproc: int | None, output: Path, *, as_json: bool
) -> None:
    """Measure links, on every rank of this job or of one that is started here."""
    from hzplan import job
    from hzplan.cli import console, ranks
    from hzplan.cli.paths import check_writable
    from hzplan.cli.profile_tables import show_links
    from hzplan.profiler import default_mesh, measure_links_alone

    here = ranks.this_rank(nproc)
    mesh = _mesh(mesh_text, here.world if here else nproc or 1)
    if here is None:
        check_writable(output)
        ranks.start_here(nproc or 1)
        return
    with job.join(here) as joined:
        joined.agree(lambda: check_writable(output) if here.rank == 0 else None)
        if here.rank == 0:
            ranks.say_how_on_a_cluster(here)
        mesh, names = (mesh, _tier_names(len(mesh.tiers))) if mesh else default_mesh()
        with console.Bar("profile", shown=here.rank == 0) as bar:
            found = measure_links_alone(mesh=mesh, tier_names=names, dtype=dtype, progress=bar.update)
        if here.rank == 0:
            found.save(output)
            show_links(found, output, as_json=as_json)


def _with_links(request: _Request, path: Path, *, as_json: bool) -> None:
    """Measure a model in this process, for the cluster that the links are of."""
    from hzplan.cli import console
    from hzplan.cli.profile_tables import show
    from hzplan.formats.links import Links
    from hzplan.profiler import measure_with

    links = Links.load(path)
    workload = request.workload()
    with console.Bar("profile") as bar:
        profile = measure_with(
            links,
            workload,
            micro_batches=request.micro_batches,
            dtype=request.dtype,
            optimizer=request.optimizer,
            progress=bar.update,
        )
    profile.save(request.output)
    show(profile, request.output, as_json=as_json)


def _without_a_cluster(
    request: _Request, name: str, nodes: int | None, mesh_text: str | None, *, as_json: bool
) -> None:
    """Model the profile, in this process."""
    import torch

    from hzplan.cli import console
    from hzplan.cli.profile_tables import show
    from hzplan.formats.cluster import find_cluster
    from hzplan.hierarchy import Mesh
    from hzplan.profiler.analytic import analyse

    cluster, device = find_cluster(name)
    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes {nodes}: a cluster has at least 1 node")
    if mesh_text is None:
        sizes = [tier.ranks for tier in cluster.tiers]
        mesh = Mesh.of_tiers(*sizes[:-1], nodes or sizes[-1])
    else:
        mesh = _parsed(mesh_text)
        if nodes is not None:
            raise UserError("--mesh says how many nodes there are; leave --nodes out")
    with torch.device("meta"):  # looking at a factory's model must not take memory either
        workload = request.workload()
    with console.Bar("profile") as bar:
        profile = analyse(
            workload,
            cluster,
            device,
            mesh=mesh,
            micro_batches=request.micro_batches,
            dtype=request.dtype,
            optimizer=request.optimizer,
            progress=bar.update,
        )
    profile.save(request.output)
    show(profile, request.output, as_json=as_json)


@dataclass(frozen=True)
class _Request:
    """What to measure."""

    model: str
    seq_len: int | None
    micro_batches: tuple[int, ...]
    dtype: Dtype
    optimizer: str
    mesh: Mesh | None
    output: Path

    def workload(self, *, writes: bool = True) -> Workload:
        """The model; UserError when it cannot be had or measured, or the profile not be written."""
        from hzplan.cli.paths import check_writable
        from hzplan.models.workload import load
        from hzplan.profiler.optimizer import OPTIMIZERS

        if writes:
            check_writable(self.output)
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"--optimizer {self.optimizer} is not known; use {', '.join(OPTIMIZERS)}")
        return load(self.model, seq_len=self.seq_len)

    def measure(self, workload: Workload, progress: Callable[[str, float], None]) -> Profile:
        """On every rank of the job."""
        from hzplan.profiler import default_mesh, measure

        mesh, names = (self.mesh, _tier_names(len(self.mesh.tiers))) if self.mesh else default_mesh()
        return measure(
            workload,
            mesh=mesh,
            tier_names=names,
            micro_batches=self.micro_batches,
            dtype=self.dtype,
            optimizer=self.optimizer,
            progress=progress,
        )


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
    if text is None:
        return None
    mesh = _parsed(text)
    if mesh.world != world:
        raise UserError(
            f"--mesh {text} has {mesh.world} ranks, this job has {world}; give --nproc {mesh.world}"
        )
    return mesh


def _parsed(text: str) -> Mesh:
    from hzplan.hierarchy import Mesh

    try:
        return Mesh.parse(text)
    except ValueError as error:
        raise UserError(f"--mesh: {error}") from None


def _tier_names(tiers: int) -> tuple[str, ...]:
    """Names for the tiers of a mesh that the user gave, as ``default_mesh`` has them."""
    if tiers <= 2:
        return ("node", "network")[:tiers]
    return ("node", *(f"network {number}" for number in range(1, tiers)))
