"""May a model be loaded, and as what: `ladder` decides from a `wish` to a `verdict`; `reduction`, `eviction`, `offload`
and `standby` are its rungs, `room` and `search` what they measure and look with.
"""
