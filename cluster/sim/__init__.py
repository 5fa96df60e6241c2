"""The deterministic simulator: clusters of the production's own classes in virtual time, faults drawn from a seed.

Not here: anything that production runs. What the simulator leaves out stands in `docs/simulator.md`.
"""
