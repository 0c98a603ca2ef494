"""Pins: shard counts that the user has fixed for some tensors, as constraints of the solver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hzplan.core.hierarchy import Levels, Mesh
from hzplan.core.layout import TensorSpec
from hzplan.core.matrices import MATRIX_WAYS, MatrixWay
from hzplan.errors import UserError
from hzplan.formats.profile import Profile
from hzplan.solver.target import Grammar, keeps

ANY = "*"


@dataclass(frozen=True)
class Pin:
    """Shard counts (parameter, gradient, optimizer state; None: free) for the tensors that ``pattern``, a
    name with wildcards, matches, and how a matrix optimizer gets the whole of those that are matrices to it
    (None: free)."""

    pattern: str
    shards: tuple[int | None, int | None, int | None]
    matrix: MatrixWay | None = None

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Pin:
        """Read ``'layers.*.weight=1,8,64'``, in which a number may be ``*``, and after which the way of a
        matrix may come, as in ``1,8,64,exchanged``; UserError of one line."""
        pattern, _, given = text.rpartition("=")
        parts = [part.strip() for part in given.split(",")]
        matrix = next((way for way in MATRIX_WAYS if way == parts[-1]), None)
        parts = parts[:-1] if matrix else parts
        if not pattern or len(parts) != 3 or not all(part == ANY or part.isdecimal() for part in parts):
            raise UserError(
                f"--pin {text!r}: write TENSOR=PARAM,GRAD,OPTIM in shards, as in "
                f"'layers.*=1,1,{mesh.world}'; {ANY} stands for any"
            )
        shards = tuple(None if part == ANY else int(part) for part in parts)
        for number in shards:
            if number is not None and number not in mesh.shards:
                counts = ", ".join(map(str, dict.fromkeys(mesh.shards)))
                raise UserError(
                    f"--pin {text!r}: mesh {mesh} has no level with {number} shards; it has {counts}"
                )
        return cls(pattern, (shards[0], shards[1], shards[2]), matrix)

    def allows(self, triple: Levels, mesh: Mesh, *, trainable: bool) -> bool:
        """Whether a tensor's levels are as pinned; a frozen one has a parameter only."""
        if self.matrix and triple.matrix not in ("", self.matrix):
            return False
        pairs = list(zip(self.shards, triple.three, strict=True))
        return all(
            wanted is None or wanted == mesh.shards[level]
            for wanted, level in (pairs if trainable else pairs[:1])
        )


class Pins:
    """All pins of a question, and the limits of its target. UserError where a pin matches no tensor of the
    profile, or where several pins, or they and the target, leave a tensor no legal levels."""

    def __init__(self, texts: Sequence[str], profile: Profile, grammar: Grammar | None = None) -> None:
        self.mesh, self.grammar = profile.mesh, grammar
        self.pins = [Pin.parse(text, self.mesh) for text in texts]
        names = {tensor.name: tensor.spec for unit in profile.units for tensor in unit.tensors}
        for text, pin in zip(texts, self.pins, strict=True):
            if not any(fnmatchcase(name, pin.pattern) for name in names):
                one = next(iter(names))
                raise UserError(f"--pin {text!r}: no tensor is called {pin.pattern!r}; one is called {one!r}")
        triples = self.mesh.triples(matrices=profile.optimizer.matrix is not None)
        self._trained = {u.name: [t.spec.trainable for t in u.tensors] for u in profile.units if u.tensors}
        for name, tensor in names.items():
            if self.of(name) and not self.allowed(tensor, triples):
                said = ", ".join(f"{pin.pattern}={pin.shards}" for pin in self.of(name))
                said += " and the target" if grammar is not None else ""
                raise UserError(
                    f"--pin: no levels of {name} are as {said} say; the optimizer state needs at least the "
                    "shards of parameter and gradient"
                )

    def of(self, name: str) -> list[Pin]:
        """The pins of a tensor."""
        return [pin for pin in self.pins if fnmatchcase(name, pin.pattern)]

    def allowed(self, tensor: TensorSpec, triples: Iterable[Levels]) -> frozenset[Levels]:
        """The triples that the pins of a tensor allow."""
        pins, trainable = self.of(tensor.name), tensor.trainable
        may = triples if self.grammar is None else self.grammar.allowed(trainable=trainable)
        own = {
            triple._replace(matrix=triple.matrix if tensor.matrix else "", flat=triple.flat and trainable)
            for triple in may
        }
        return frozenset(
            triple
            for triple in own
            if all(pin.allows(triple, self.mesh, trainable=trainable) for pin in pins)
        )

    def keep(self, profile: Profile, levels: Mapping[str, Sequence[Levels]]) -> bool:
        """Whether a choice of levels, by unit, keeps all pins and is within the target's limits."""
        if not keeps(self.grammar, self._trained, levels):
            return False
        return not self.pins or all(
            triple in self.allowed(tensor.spec, [triple])
            for unit in profile.units
            for tensor, triple in zip(unit.tensors, levels.get(unit.name, ()), strict=True)
        )
