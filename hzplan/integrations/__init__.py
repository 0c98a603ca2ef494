"""Trainers of others under a plan; each module needs the package that it is for."""
