"""Text at the edge of the engine: tokens from text and messages, text from tokens, stop strings.

Not here: anything about models' weights; no torch.
"""
