"""The wire schema and the guard: what is refused, on which site, with which words."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ldt.comm.wire import (
    DEFAULT_SCHEMA,
    FLOAT_DTYPES,
    WIRE_DTYPES,
    TensorSignature,
    WireGuard,
    WireSchema,
    WireTensor,
    gradient_signature,
    signature_of,
)
from ds_ldt.errors import ConfigError, LinkError, PrivacyError

HIDDEN = WireTensor(
    name="hidden_states", dtype="float", ndim=3, max_numel=1000, gradient=True, reveals="the text, to who inverts it"
)
POSITIONS = WireTensor(name="position_ids", dtype="int32", ndim=2, max_numel=100, reveals="lengths")
MASK = WireTensor(name="padding_mask", dtype="bool", ndim=2, optional=True)
SCHEMA = WireSchema(tensors=(HIDDEN, POSITIONS, MASK), uniform=True)
hidden = torch.zeros(2, 5, 4, requires_grad=True)
positions = torch.zeros(2, 5, dtype=torch.int32)
mask = torch.ones(2, 5, dtype=torch.bool)

REFUSED = {
    "undeclared integer": (
        (hidden, positions, mask, torch.zeros(2, 5, dtype=torch.int64)),
        "tensor 4 of 4.*int64.*not declared",
    ),
    "undeclared bool": ((hidden, positions, mask, mask), "tensor 4 of 4.*bool.*not declared"),
    "undeclared float": ((hidden, positions, mask, torch.zeros(3)), "tensor 4 of 4.*float32.*not declared"),
    "token ids in the place of positions": (
        (hidden, torch.zeros(2, 5, dtype=torch.int64)),
        "tensor 2 of 2.*dtype is int64, declared is int32",
    ),
    "integer in the place of a float": ((positions, positions), "tensor 1 of 2.*dtype is int32, declared is float"),
    "float64": ((hidden.double(), positions), "tensor 1 of 2.*float64 never crosses"),
    "complex": ((torch.zeros(1, 1, 1, dtype=torch.complex64), positions), "complex64 never crosses"),
    "wrong number of dimensions": ((hidden[0], positions), "tensor 1 of 2.*2 dimensions, declared are 3"),
    "too many elements": (
        (torch.zeros(10, 10, 11), positions),
        "tensor 1 of 2.*1100 elements, declared are at most 1000",
    ),
    "missing tensor": ((hidden,), "'position_ids' is missing"),
    "nothing at all": ((), "'hidden_states' is missing"),
    "sparse": ((torch.zeros(1, 1, 1).to_sparse(), positions), "layout is torch.sparse_coo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_edge_refuses_what_is_not_declared_and_names_place_list_and_fix(case: str) -> None:
    tensors, pattern = REFUSED[case]
    with pytest.raises(PrivacyError, match=pattern) as caught:
        WireGuard(SCHEMA, "edge").check_send(1, tensors)
    text = str(caught.value)
    assert "boundary 1" in text
    assert "on the edge" in text
    assert all(name in text for name in ("hidden_states", "position_ids", "padding_mask"))
    assert "Fix: " in text


@pytest.mark.parametrize("case", REFUSED)
def test_the_cloud_refuses_the_same_as_a_link_error(case: str) -> None:
    tensors, pattern = REFUSED[case]
    with pytest.raises(LinkError, match=pattern):
        WireGuard(SCHEMA, "cloud").check_send(0, tensors)


@pytest.mark.parametrize("tensors", [(hidden, positions), (hidden, positions, mask), (hidden.bfloat16(), positions)])
def test_declared_messages_pass_with_or_without_optional_tensors(tensors: tuple[torch.Tensor, ...]) -> None:
    guard = WireGuard(SCHEMA, "edge")
    guard.check_send(0, tensors)
    guard.check_announced(0, signature_of(tensors))


def test_S54_float64_is_refused_by_declaration_send_and_announcement() -> None:
    with pytest.raises(ConfigError, match="float64 never crosses"):
        WireTensor(name="x", dtype="float64")
    assert torch.float64 not in WIRE_DTYPES
    guard = WireGuard(DEFAULT_SCHEMA, "edge")
    with pytest.raises(PrivacyError, match="convert it before the boundary"):
        guard.check_send(0, (torch.zeros(1, dtype=torch.float64),))
    with pytest.raises(PrivacyError, match="float64 never crosses"):
        guard.check_announced(0, (TensorSignature(torch.float64, (1,), False),))


def test_an_announced_size_over_the_limit_is_refused_without_allocating() -> None:
    absurd = TensorSignature(torch.float32, (2**40, 2**20, 2), True)
    with pytest.raises(LinkError, match=rf"{2**61} elements"):
        WireGuard(SCHEMA, "cloud").check_announced(0, (absurd, *signature_of((positions,))))


def test_an_announced_negative_size_is_refused() -> None:
    with pytest.raises(LinkError, match="negative"):
        WireGuard(DEFAULT_SCHEMA, "cloud").check_announced(0, (TensorSignature(torch.float32, (-2, -3), False),))


def test_a_gradient_where_none_is_declared_is_refused() -> None:
    schema = WireSchema(tensors=(WireTensor(name="bias", dtype="float"),), uniform=True)
    with pytest.raises(PrivacyError, match="requires a gradient, but 'bias' is declared without"):
        WireGuard(schema, "edge").check_send(0, (torch.zeros(2, requires_grad=True),))


def test_a_plain_list_of_layers_sends_a_float_whose_gradient_returns() -> None:
    WireGuard(DEFAULT_SCHEMA, "edge").check_send(0, (torch.zeros(2, requires_grad=True),))
    WireGuard(DEFAULT_SCHEMA, "cloud").check_send(0, (torch.zeros(2),), gradients=True)


def test_S03_a_declared_gradient_may_be_absent() -> None:
    WireGuard(SCHEMA, "edge").check_send(0, (hidden.detach(), positions))


def test_gradient_messages_hold_gradients_of_declared_tensors_in_order() -> None:
    second = WireTensor(name="residual", dtype="float", ndim=2, gradient=True)
    guard = WireGuard(WireSchema(tensors=(HIDDEN, POSITIONS, second), uniform=True), "edge")
    three, two = torch.zeros(1, 2, 3), torch.zeros(2, 3)
    for allowed in ((three, two), (three,), (two,), ()):
        guard.check_send(0, allowed, gradients=True)
    for refused in ((two, three), (three, two, two), (positions,), (three.double(),)):
        with pytest.raises(PrivacyError, match="Gradient refused"):
            guard.check_send(0, refused, gradients=True)


def test_gradient_signature_keeps_the_tensors_with_a_gradient() -> None:
    assert gradient_signature(signature_of((hidden, positions))) == (TensorSignature(torch.float32, (2, 5, 4), False),)


def test_each_boundary_can_have_its_own_list() -> None:
    schema = WireSchema(tensors=(HIDDEN,), uniform=False, per_boundary={1: (POSITIONS,)})
    guard = WireGuard(schema, "edge")
    guard.check_send(1, (positions,))
    with pytest.raises(PrivacyError, match="declared is float"):
        guard.check_send(0, (positions,))


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        ({"dtype": "int"}, "expected one of float, float32"),
        ({"dtype": "int64", "gradient": True}, "gradient=True only on a floating-point"),
        ({"dtype": "float", "ndim": -1}, "ndim"),
        ({"dtype": "float", "ndim": 9}, "ndim"),
        ({"dtype": "float", "max_numel": 0}, "max_numel"),
    ],
)
def test_faulty_declarations_are_config_errors_that_name_the_tensor(
    arguments: dict[str, object], pattern: str
) -> None:
    with pytest.raises(ConfigError, match=f"'states'.*{pattern}"):
        WireTensor(name="states", **arguments)  # type: ignore[arg-type]


def test_optional_tensors_stand_at_the_end() -> None:
    with pytest.raises(ConfigError, match=r"'padding_mask'.*move it behind 'position_ids'"):
        WireSchema(tensors=(HIDDEN, MASK, POSITIONS), uniform=True)


def test_the_statement_lists_every_tensor_and_what_it_reveals() -> None:
    text = WireSchema(tensors=(HIDDEN, MASK), uniform=True, per_boundary={2: (POSITIONS,)}).describe()
    assert re.search("padding_mask: bool, 2 dimensions, at most [0-9]+ elements, optional\n", text)
    assert "optional" not in HIDDEN.reveals + str(HIDDEN)
    for phrase in ("hidden_states", "padding_mask", "boundary 2", "position_ids", "reveals: lengths", HIDDEN.reveals):
        assert phrase in text
    assert "reveals: not stated" in text
    assert "its gradient returns" in text
    assert not re.search(r"\b(secure|private|anonymous)", text, re.IGNORECASE)


def test_boundaries_with_the_same_list_are_named_together() -> None:
    of = {boundary: (HIDDEN,) for boundary in (0, 1, 2, 4, 6, 7)}
    assert "  boundaries 0-2, 4, 6-7:\n" in WireSchema(tensors=(), uniform=True, per_boundary=of).describe()


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
signatures = st.builds(
    TensorSignature, st.sampled_from([*WIRE_DTYPES, torch.float64, torch.complex64]), shapes, st.booleans()
)


@given(st.lists(signatures, max_size=4).map(tuple))
def test_only_what_the_schema_describes_passes(signature: tuple[TensorSignature, ...]) -> None:
    def fits(one: TensorSignature, dtypes: tuple[torch.dtype, ...], ndim: int) -> bool:
        return one.dtype in dtypes and len(one.shape) == ndim

    allowed = (
        2 <= len(signature) <= 3
        and fits(signature[0], FLOAT_DTYPES, 3)
        and fits(signature[1], (torch.int32,), 2)
        and all(fits(one, (torch.bool,), 2) for one in signature[2:])
        and not any(one.gradient for one in signature[1:])
    )
    guard = WireGuard(SCHEMA, "cloud")
    if allowed:
        guard.check_announced(0, signature)
    else:
        with pytest.raises(LinkError):
            guard.check_announced(0, signature)
