"""Guesses of a sequence's next tokens, checked by the model in one row: who guesses, how many, what is accepted.

A guess costs or saves time and never changes a token: `acceptance.py`. Not here: planning rows, and blocks, which are
the scheduler's.
"""
