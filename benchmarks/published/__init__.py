"""Predictions held against published measurements: fitted, left out in turn, tabled and plotted."""
