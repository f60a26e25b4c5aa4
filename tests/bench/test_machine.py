"""The machine as the lines of the bench name it."""

from orca_bench.machine import field, isa


def test_the_first_field_of_a_name() -> None:
    assert field("processor\t: 0\nmodel name\t: A: B\n\nprocessor\t: 1\nmodel name\t: C\n", "model name") == "A: B"


def test_this_machine_has_an_instruction_set() -> None:
    assert isa()
