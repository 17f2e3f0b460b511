"""Known first words of Philox4x32-10: (seed, offset, token, word)."""

WORDS = [
    (0, 0, 0, 0x6627E8D5),
    (42, 0, 5, 0x7B835ADF),
    (42, 1, 5, 0x98712BB9),
    (42, 0, 6, 0xBC7AB43E),
    (4986890812388105367, 3, 49151, 0x76A606E8),
    (2**63 - 1, 2**32, 7, 0x95CBF522),
]
