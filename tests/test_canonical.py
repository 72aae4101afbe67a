"""The quick way to the canonical form gives the bytes of the slow one, or keys would change under stored operations."""

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from reconciliation import keys

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-keys.EXACT, keys.EXACT) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_every_value_gets_the_bytes_of_rfc_8785(value):
    assert keys.canonical(value) == rfc8785.dumps(value)


@pytest.mark.parametrize(
    "value",
    [
        {"b": 1, "a": '\x00\x1f\x7f"\\/\u2028', "é": 2},
        {"\U0001d306": 1, "\ufb01": 2},  # UTF-16 units and code points sort these differently
        {"of": [1.0, -0.0, 1e21, 0.1]},
    ],
)
def test_what_a_plain_writer_gets_wrong_goes_the_slow_way(value):
    assert keys.canonical(value) == rfc8785.dumps(value)
    assert keys.canonical([value]) == rfc8785.dumps([value])


@pytest.mark.parametrize("value", [2**53, float("nan"), float("inf"), "\ud800", {1: 2}, {"a": object()}])
def test_what_json_cannot_hold_exactly_is_refused_either_way(value):
    with pytest.raises(keys.InvalidField):
        keys.canonical({"deep": [value]})
