"""How version v+1 reaches inference, and the proof that it arrived."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torch import Tensor

from archon.engine import Publication
from archon.weights import Digest, read_folder, save_folder
from areal.inference.backend import Backend, BackendError

Mode = Literal["memory", "disk"]


async def update_weights(
    publication: Publication, backend: Backend, *, mode: Mode, model_folder: Path, scratch: Path, deadline: float
) -> str:
    """Stage a publication while the engine generates, then switch it over in one pause.

    Args:
        mode: ``memory`` hands tensors over in this process; ``disk`` writes a Hugging Face folder under ``scratch``
            which the engine reads and which is then removed.
        model_folder: where config and tokenizer files come from, for ``disk``.
        deadline: seconds for stage and commit together.

    Returns:
        The digest that trainer and engine agree on.

    Raises:
        DigestMismatch: what arrived is not what was published; the old version still serves.
        BackendError: the engine failed, answered late, or reports another version or digest afterwards.
    """
    sent = Digest()

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in publication.tensors():
            sent.update(name, tensor)
            yield name, tensor

    version = publication.version
    scope = asyncio.timeout(deadline)
    try:
        async with scope:
            if mode == "disk":
                with tempfile.TemporaryDirectory(prefix=f"weights_v{version}_", dir=scratch) as parent:
                    folder = Path(parent) / "hf"
                    await asyncio.to_thread(save_folder, folder, stream(), model_folder)
                    await backend.stage(version, read_folder(folder))
            else:
                await backend.stage(version, stream())
            await backend.commit(version, sent.hexdigest())
    except BaseException as error:
        await backend.unstage()
        if scope.expired():
            raise BackendError(f"weight update to version {version} took longer than {deadline:.0f} s") from error
        raise
    if (backend.version, backend.digest) != (version, sent.hexdigest()):
        raise BackendError(
            f"after the update to version {version} ({sent.hexdigest()[:12]}) the engine reports "
            f"version {backend.version} ({backend.digest[:12]})"
        )
    return sent.hexdigest()
