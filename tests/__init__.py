"""Tests. A package, so that helpers are importable as ``tests.…`` also in processes that tests start."""
