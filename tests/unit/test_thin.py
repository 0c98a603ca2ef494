"""Models with fewer layers: what remains, and what it is called."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hzplan.models.scaled_down import neighbourhoods, scale_down


@given(st.lists(st.integers(0, 3)), st.integers(1, 9))
def test_every_pair_of_neighbours_remains(kinds: list[int], least: int) -> None:
    kept = neighbourhoods(kinds, least)
    adjacent = {(kinds[a], kinds[b]) for a, b in pairwise(kept) if b == a + 1}
    assert adjacent == set(pairwise(kinds))
    assert kept == sorted(set(kept)) and len(kept) <= max(least, 2 * len(adjacent) + 2)
    assert len(kept) >= min(least, len(kinds))
    if kinds:
        assert kept[0] == 0 and kept[-1] == len(kinds) - 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(5))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))


def test_layers_go_experts_and_other_lists_stay() -> None:
    model = Model()
    third = model.layers[3]
    units = [f"layers.{index}.experts" for index in range(6)] + ["heads.0"]
    renamed = scale_down(model, units, lambda name: name in ("layers.3", "layers.4"))
    # kinds: no no no yes yes no
    assert renamed("layers.2.experts.0.weight") == "layers.2.experts.0.weight"
    assert len(model.layers) == 6 and len(model.heads) == 4 and len(model.layers[0].experts) == 5
    assert model.layers[3] is third
    renamed = scale_down(model, units, lambda name: name == "layers.5")
    assert len(model.layers) == 4 and model.heads is not None
    assert renamed("layers.4.experts.0.weight") == "layers.2.experts.0.weight"
    assert renamed("layers.3") is None and renamed("heads.0.bias") == "heads.0.bias"
