"""No number is shown as 0.0 that is not zero."""

from __future__ import annotations

import pytest

from lm.units import format_bytes, format_number, format_parameters


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (42_900_000, "40.9 MiB"),
        (2**30, "1.00 GiB"),
        (4096 * 2**30, "4,096.00 GiB"),
    ],
)
def test_format_bytes_chooses_the_unit(n: int, expected: str) -> None:
    assert format_bytes(n) == expected


@pytest.mark.parametrize(
    ("n", "expected"),
    [(96, "96"), (34_240, "34.2K"), (3_480_000, "3.5M"), (6_738_415_616, "6,738.4M")],
)
def test_format_parameters_chooses_the_unit(n: int, expected: str) -> None:
    assert format_parameters(n) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(2.0, "2"), (2.5, "2.5"), (99.96, "100"), (2634.1, "2,634")]
)
def test_format_number_has_three_digits_or_no_fraction(value: float, expected: str) -> None:
    assert format_number(value) == expected
