"""Measured comparisons: the plan beside what a user would pick instead, on a cluster in a box.

``python -m benchmarks --help`` says how to run them. Regimes are data (regimes.json), written down before the
first of them was measured.
"""
