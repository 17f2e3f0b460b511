"""Bytes in any portions, whole characters out."""

import pytest

from mstar.text.utf8 import Utf8Reader

TEXTS = [
    b"a\xc3\xa9z",
    b"\x80\x80\x80\x80a",
    b"\xa9 b",
    b"\xf0\x9f\x8e\x89",
    b"a\xf0\x9f",
    b"\xff\xc3(",
    b"",
    b"\x80\xc3\xa9",
]


@pytest.mark.parametrize("data", TEXTS)
def test_a_fork_goes_on_from_the_same_point(data):
    for cut in range(len(data) + 1):
        reader = Utf8Reader()
        reader.read(data[:cut])
        twin = reader.fork()
        ends = [(each.read(data[cut:]) + each.flush(), each.num_orphans) for each in (reader, twin)]
        assert ends[0] == ends[1], cut


@pytest.mark.parametrize("data", TEXTS)
def test_the_text_does_not_depend_on_the_portions(data):
    whole = Utf8Reader()
    expected = whole.read(data) + whole.flush()
    single = Utf8Reader()
    assert "".join(single.read(data[at : at + 1]) for at in range(len(data))) + single.flush() == expected
