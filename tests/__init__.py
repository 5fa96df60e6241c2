"""A package, so that `tests.support` is this one and nobody else's, also in workers' processes."""
