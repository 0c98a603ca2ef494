"""Checkpoints: saved under one plan and world, loaded under any other."""
