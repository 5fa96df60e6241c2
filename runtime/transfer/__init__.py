"""Replicating sealed blocks from one group's prefix cache into another's. Not: deciding when that is worth it."""
