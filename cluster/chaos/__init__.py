"""Faults on purpose, against a deployment that runs: what happened, what it cost, and whether any answer changed.

`plan`, `streams`, `faults` and `report` are pure (no I/O, no clock); `processes`, `proxy` and `run` act.
"""
