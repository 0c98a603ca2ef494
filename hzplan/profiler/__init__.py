"""Measures a model's units and a cluster's links, where they will really run, into a profile."""

from hzplan.profiler.measure import measure, measure_links_alone, measure_with
from hzplan.profiler.session.ranks import default_mesh

__all__ = ["default_mesh", "measure", "measure_links_alone", "measure_with"]
