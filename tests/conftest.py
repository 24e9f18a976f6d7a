"""Its presence puts tests/ on the import path, for helpers that several test folders share."""
