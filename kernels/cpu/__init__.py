"""CPU kernels in C++ behind a plain C ABI: attention straight from blocks, and the small operations between linears.

`library.py` finds and tests what `build.py` compiled; without it the torch operations of the parent folder are used.
"""
