"""Under which names a checkpoint of torch.distributed.checkpoint has what a model has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from torch import nn

from hzplan.checkpoint.dcp_source import Source, Stored
from hzplan.checkpoint.entries import aliases, buffers
from hzplan.errors import UserError
from hzplan.formats.checkpoint import MODEL


class Names:
    """``of_weights``: all names that the model's weights may have in the source, once they were found."""

    def __init__(self, source: Source, model: nn.Module) -> None:
        self.source, self.of_weights = source, frozenset[str]()
        # What has no elements, nobody saves.
        self.firsts = {name: [name] for name, value in model.named_parameters() if value.numel()}
        self.buffers = [entry.name.removeprefix(MODEL) for entry in buffers(model)]
        for alias, first in aliases(model).items():
            if first.removeprefix(MODEL) in self.firsts:
                self.firsts[first.removeprefix(MODEL)].append(alias.removeprefix(MODEL))

    def weights(self) -> dict[str, Stored]:
        """By parameter and buffer; UserError naming the first that is missing."""
        wanted = {**self.firsts, **{name: [name] for name in self.buffers}}
        prefix, found = self._under(wanted, ("model.", ""))
        if missing := next((name for name in wanted if name not in found), None):
            raise UserError(f"{self.source.path}: {missing} is not in it; this is another model's checkpoint")
        self.of_weights = frozenset(prefix + name for names in wanted.values() for name in names)
        return found

    def states(
        self, trained: Sequence[str], keys: Mapping[str, Set[str]], optimizer: str
    ) -> dict[str, dict[str, Stored]]:
        """By trained parameter, the state that the source has for it, by its ``keys``: none for one that had
        no gradient yet. UserError where a key is missing."""
        if not trained:
            return {}
        every = sorted({key for name in trained for key in keys[name]})
        if not every:
            if other := next(
                (there for there in self.source.tensors if f"state.{trained[0]}." in there), None
            ):
                raise UserError(
                    f"{self.source.path}: has {other}, and {optimizer} keeps no state with these options; "
                    "begin with the weights alone: hzplan run --weights"
                )
            return {name: {} for name in trained}
        found = {
            key: self._under(
                {name: [f"{o}.{key}" for o in self.firsts[name]] for name in trained if key in keys[name]},
                ("optimizer.state.", "state.", "optim.state."),
            )[1]
            for key in every
        }
        if not any(found.values()):
            raise UserError(
                f"{self.source.path}: no state of the optimizer by the parameters' names (it is saved with "
                "torch.distributed.checkpoint.state_dict.get_state_dict); begin with the weights alone: "
                "hzplan run --weights"
            )
        states = {name: {key: of[name] for key, of in found.items() if name in of} for name in trained}
        for name, of in states.items():
            missing = next((key for key in sorted(keys[name]) if key not in of), None)
            if of and missing is not None:
                raise UserError(
                    f"{self.source.path}: {name}.{missing} is not in it, and {optimizer} keeps it with these "
                    "options"
                )
        return states

    def _under(
        self, wanted: Mapping[str, Sequence[str]], usual: Sequence[str]
    ) -> tuple[str, dict[str, Stored]]:
        """The one prefix that has most of ``wanted``, and those; of several with as many the ``usual`` one,
        as beside a model there may be its average or a second one. UserError where that does not decide."""
        tensors = self.source.tensors
        found: dict[str, dict[str, Stored]] = {}
        for prefix in self._prefixes([name for names in wanted.values() for name in names]):
            found[prefix] = {
                name: tensors[prefix + next(n for n in names if prefix + n in tensors)]
                for name, names in wanted.items()
                if any(prefix + n in tensors for n in names)
            }
        most = max(map(len, found.values()), default=0)
        best = [prefix for prefix, there in found.items() if len(there) == most]
        chosen = next((prefix for prefix in usual if prefix in best), None)
        if len(best) > 1 and chosen is None:
            raise UserError(
                f"{self.source.path}: several models or optimizers have the names: "
                f"{', '.join(map(repr, best))}; save the one to go on with as 'model' and 'optimizer'"
            )
        if not best:
            return "", {}
        prefix = best[0] if chosen is None else chosen
        return prefix, found[prefix]

    def _prefixes(self, names: Collection[str]) -> list[str]:
        """What stands before one of the names in the source, the shortest first."""
        looked_for, found = frozenset(names), set[str]()
        for there in self.source.tensors:
            parts = there.split(".")
            for at in range(len(parts)):
                if ".".join(parts[at:]) in looked_for:
                    found.add("".join(f"{part}." for part in parts[:at]))
        return sorted(found, key=lambda prefix: (len(prefix), prefix))
