"""Nothing crosses a document border: not attention, not positions, not gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, build, documents, ours_from, pack

from archon.models.decoder import Decoder


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Decoder:
    return ours_from(build(request.param))


def test_packed_equals_separate(model: Decoder) -> None:
    sequences = documents()
    packed = model(*pack(sequences))
    separate = torch.cat([model(*pack([sequence])) for sequence in sequences])
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)


def test_a_neighbour_changes_nothing(model: Decoder) -> None:
    first, middle, last = documents(lengths=(6, 11, 4))
    with torch.no_grad():
        before = model(*pack([first, middle, last]))
        after = model(*pack([first, (middle + 1) % 97, last]))
    kept = torch.tensor([*range(6), *range(17, 21)])
    torch.testing.assert_close(after[kept], before[kept], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(after[6:17], before[6:17], atol=1e-2)


def test_a_loss_on_one_document_reaches_only_its_own_tokens(model: Decoder) -> None:
    first, second = documents(lengths=(7, 9))
    second = torch.arange(40, 49)
    first = first % 40
    model(*pack([first, second]))[:7].sum().backward()
    grad = model.model.embed_tokens.weight.grad
    assert grad[first].any(-1).all() and not grad[second].any()


def test_order_of_documents_does_not_matter(model: Decoder) -> None:
    sequences = documents()
    outputs = model(*pack(sequences)).split([len(sequence) for sequence in sequences])
    reordered = model(*pack(sequences[::-1]))
    torch.testing.assert_close(reordered, torch.cat(outputs[::-1]), atol=1e-5, rtol=1e-5)
