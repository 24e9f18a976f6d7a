"""Its presence puts tests/ on the import path, for helpers that several test folders share."""

import os

# Triton reads this once, when it is imported, and much of torch and transformers imports it: before any test module.
os.environ["TRITON_INTERPRET"] = "1"
