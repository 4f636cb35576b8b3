"""Predicted memory against the engine's own dry run, on header-only files of real models' dimensions."""
