"""Paces for parameters on a device, through host memory.

Exchanges, methods, codecs and tables are CPU code. For a bucket on a device they get a HOST BUCKET
(host_bucket.py), whose flat tensors are in engine memory; exchange.py and served.py copy gradients
to it during backward and results back, method_buckets.py the parameters around an averaging round.
"""
