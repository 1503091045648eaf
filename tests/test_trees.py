"""What collate functions of torch and transformers return goes to the device whole, in containers of the same kind.

There is one device on a machine without an accelerator, so tensors are moved to torch's "meta" device: one that stayed
where it was is told by its device, whatever container it was in.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding, BatchFeature, DataCollatorWithPadding, default_data_collator
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from ds_ldt.data.containers import map_tensors, tensors_in, to_device

META = torch.device("meta")
Pair = namedtuple("Pair", ["first", "second"])


class Typed(NamedTuple):
    ids: Tensor
    mask: Tensor | None = None


@dataclass
class Plain:
    ids: Tensor
    name: str = "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    ids: Tensor
    inner: Any = None


class Batch(dict[str, Any]):
    """A dictionary with something beside its items."""

    size = 0


class OwnMapping(UserDict[str, Any]):
    pass


class Rows(list[Any]):
    pass


class Moving:
    """Not a container: it knows by itself how to move."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def to(self, device: torch.device) -> Moving:
        return Moving(self.ids.to(device))


def ones() -> Tensor:
    return torch.ones(2, 3)


def named() -> dict[str, Tensor]:
    return {"input_ids": ones(), "labels": ones()}


def with_default() -> defaultdict[str, Any]:
    found: defaultdict[str, Any] = defaultdict(list, named())
    return found


def sized() -> Batch:
    batch = Batch(named())
    batch.size = 5
    return batch


CONTAINERS: dict[str, tuple[Callable[[], Any], int]] = {
    "tensor": (ones, 1),
    "tuple": (lambda: (ones(), ones()), 2),
    "list": (lambda: [ones(), ones()], 2),
    "namedtuple": (lambda: Pair(ones(), ones()), 2),
    "NamedTuple with a gap": (lambda: Typed(ones()), 1),
    "dict": (named, 2),
    "OrderedDict": (lambda: OrderedDict(named()), 2),
    "defaultdict": (with_default, 2),
    "deque": (lambda: deque([ones()]), 1),
    "UserDict": (lambda: UserDict(named()), 2),
    "UserList": (lambda: UserList([ones()]), 1),
    "BatchEncoding": (lambda: BatchEncoding(named()), 2),
    "BatchEncoding of lists": (lambda: BatchEncoding({"rows": [ones(), (ones(),)]}), 2),
    "BatchFeature": (lambda: BatchFeature(named()), 2),
    "BatchFeature of named tuples": (lambda: BatchFeature({"pair": Pair(ones(), ones())}), 2),
    "ModelOutput": (lambda: CausalLMOutput(logits=ones()), 1),
    "ModelOutput of tuples": (lambda: BaseModelOutput(last_hidden_state=ones(), hidden_states=(ones(), ones())), 3),
    "mapping proxy": (lambda: MappingProxyType(named()), 2),
    "subclass of dict": (sized, 2),
    "subclass of list": (lambda: Rows([ones()]), 1),
    "subclass of UserDict": (lambda: OwnMapping(named()), 2),
    "dataclass": (lambda: Plain(ones()), 1),
    "frozen dataclass": (lambda: Frozen(ids=ones(), inner=[Plain(ones())]), 2),
    "nested": (lambda: ([ones(), {"a": Pair(ones(), BatchEncoding(named()))}], ones()), 5),
    "torch, tuples": (lambda: default_collate([((ones(), ones()), ones())] * 2), 3),
    "torch, named tuples": (lambda: default_collate([Pair(ones(), {"a": ones()})] * 2), 2),
    "torch, mappings": (lambda: default_collate([OrderedDict(named())] * 2), 2),
    "torch, BatchEncoding": (lambda: default_collate([BatchEncoding(named())] * 2), 2),
    "transformers, default": (lambda: default_data_collator([{"input_ids": [1, 2], "label": 1}] * 2), 2),
}


@pytest.mark.parametrize("make, count", CONTAINERS.values(), ids=CONTAINERS)
def test_S84_every_tensor_of_a_container_moves_and_its_kind_stays(make: Callable[[], Any], count: int) -> None:
    batch = make()
    before = tensors_in(batch)
    moved = to_device(batch, META)
    assert len(before) == count
    assert [tensor.device for tensor in tensors_in(moved)] == [META] * count
    assert type(moved) is (type(batch) if type(batch) is not MappingProxyType else type(moved))
    assert [id(tensor) for tensor in tensors_in(batch)] == [id(tensor) for tensor in before], "the batch was changed"
    assert all(tensor.device.type == "cpu" for tensor in tensors_in(batch))


def test_S84_what_a_container_has_besides_its_tensors_stays() -> None:
    moved = to_device({"ids": ones(), "names": ["a", b"b"], "none": None, "number": 3, "range": range(2)}, META)
    assert {key: value for key, value in moved.items() if key != "ids"} == {
        "names": ["a", b"b"],
        "none": None,
        "number": 3,
        "range": range(2),
    }
    assert to_device(sized(), META).size == 5
    assert to_device(with_default(), META)["absent"] == []
    assert to_device(Typed(ones()), META).mask is None
    assert to_device(Plain(ones(), "b"), META).name == "b"


def test_S84_objects_that_can_move_move_themselves() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moving, found = to_device([Moving(ones()), packed], META)
    assert moving.ids.device == found.data.device == META
    assert found.batch_sizes.device.type == "cpu", "torch keeps these on the CPU"


def test_S84_tokenizer_collators_of_transformers() -> None:
    class Padding:
        """As much of a tokenizer as the collator needs; it returns what a tokenizer returns."""

        deprecation_warnings: dict[str, bool] = {}

        def pad(self, features: list[dict[str, list[int]]], **options: Any) -> BatchEncoding:
            return BatchEncoding({"input_ids": [one["input_ids"] for one in features]}, tensor_type="pt")

    batch = DataCollatorWithPadding(Padding())([{"input_ids": [1, 2]}] * 2)
    assert isinstance(batch, BatchEncoding)
    assert to_device(batch, META)["input_ids"].device == META


def test_moved_tensors_are_apart_from_the_graph_and_the_others_are_not_touched() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not to_device([leaf * 2], torch.device("cpu"))[0].requires_grad
    doubled = map_tensors(lambda tensor: tensor * 2, {"a": leaf, "b": "text"})
    assert doubled["a"].requires_grad and doubled["b"] == "text"
