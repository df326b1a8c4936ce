"""Benchmarks that come with cupaged: of a server under load, and of the engine in this process.

`serve.py` puts a load generator together from `datasets.py` (what is asked), `arrivals.py` (when),
`backend.py` (whom, by which protocol), `load.py` (the loop), `metrics.py` and `report.py`.
`offline.py` measures the engine without a server. Flags, printed lines and keys of the JSON are
those of `vllm bench`.
"""
