"""hzplan plans and runs sharded data-parallel training."""

__version__ = "0.1.0"
