"""Presets and grids as data: `*.yaml`."""
