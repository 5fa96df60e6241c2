"""The doors that clients knock at: wire messages, status codes, the gRPC server. The only code that touches `proto`.

Not: what a request means or where it runs; a `Service` (`cluster/service.py`) answers every call.
"""
