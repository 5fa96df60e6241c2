"""The model: what its files say (`spec`, `files`), its weights (`loader`) and the forward pass.

Not here: text, scheduling, who owns which block.
"""
