"""What a load takes: from a model's shape to bytes by part, and what this machine taught about it.

`shape` (the facts of a header), `load` (how it is loaded), `placement`, `kv_cache`, `compute_buffer` with its graph,
`repack`, `demand` (all parts together), `dry_run` (the engine's own word), `learned` (margins), `tier`, `quantization`.
"""
