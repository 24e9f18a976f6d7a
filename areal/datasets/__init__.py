"""Prompts to roll out on: ``load`` makes rows of a task, a file, a folder or a hub dataset."""

from areal.datasets.loading import Dataset, DatasetError, load

__all__ = ["Dataset", "DatasetError", "load"]
