"""The links of a cluster, measured without a model: once for all models that are planned for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hzplan.formats.base import Document
from hzplan.formats.profile import (
    ClusterEntry,
    CollectiveCurve,
    HostEntry,
    InterferenceEntry,
    ProvenanceEntry,
    RoundingEntry,
    StragglerEntry,
    check_cluster,
    check_rounding,
)


class Links(Document):
    """What ``hzplan profile --only links`` measured; the parts of a profile that are not a model's."""

    format: Literal["hzplan.links"] = "hzplan.links"
    version: Literal[2] = 2
    provenance: ProvenanceEntry
    cluster: ClusterEntry
    collectives: tuple[CollectiveCurve, ...]
    interference: tuple[InterferenceEntry, ...] = ()
    host: HostEntry | None = None
    rounding: tuple[RoundingEntry, ...] | None = Field(default=None, min_length=1)
    stragglers: tuple[StragglerEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Links:
        """As a profile's."""
        check_cluster(self.cluster, self.collectives, self.interference, self.host)
        check_rounding(self.rounding or ())
        return self
