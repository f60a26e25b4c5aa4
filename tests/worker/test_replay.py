"""A recording that is replayed on a CPU, as a CUDA graph is: it sees changed tensors, and nothing else that changed."""

import pytest
import torch
from torch import Tensor

from orca_worker.data_plane.plane import Loopback
from orca_worker.device.replay import Replayed


def test_a_replay_reads_its_inputs_where_they_lie_and_leaves_its_results_where_they_lay() -> None:
    x, weight = torch.zeros(2, 3), torch.arange(12.0).view(4, 3)

    def run() -> tuple[Tensor, Tensor]:
        first, rest = torch.nn.functional.linear(x + 1, weight).split([1, 3], 1)
        rest.mul_(2)
        return first, torch.cat([first, rest], 1)

    replay = Replayed().record(run)
    for value in (0.0, 5.0):
        x.fill_(value)
        results, right = replay(), run()
        assert [each.tolist() for each in results] == [each.tolist() for each in right]
        assert [each.data_ptr() for each in results] == [each.data_ptr() for each in replay()]


def test_a_replay_does_not_see_what_python_sees() -> None:
    """A number that was read while recording stays; so does the address of a tensor that has been replaced since."""
    x, state = torch.ones(2), {"factor": 2.0, "x": torch.ones(2)}
    replay = Replayed().record(lambda: x * state["factor"] + state["x"])
    state["factor"], state["x"] = 3.0, torch.full((2,), 100.0)
    assert replay().tolist() == [3.0, 3.0]


def test_a_replay_adds_up_over_the_ranks_again() -> None:
    """An operation of the data plane is a call of the recording, on the same tensors."""

    class Doubling(Loopback):
        def all_reduce(self, x: Tensor) -> Tensor:
            return x.mul_(2)

        def gather(self, x: Tensor, widths: list[int]) -> Tensor:
            return torch.cat([x, x], 1)

    x, recorder = torch.ones(1, 2), Replayed()
    plane = recorder.kept(Doubling())
    replay = recorder.record(lambda: plane.gather(plane.all_reduce(x + 1) + 1, [2, 2]))
    x.fill_(3)
    made = replay()
    assert made is not None
    assert made.tolist() == [[9.0] * 4]


def test_results_are_unusable_until_a_replay_fills_them() -> None:
    """The first replay may not live on what the recording has left."""
    x, made = torch.ones(2), list[Tensor]()

    def run() -> Tensor:
        made.append(x + 1)
        return made[-1]

    replay = Replayed().record(run)
    assert made[-1].isnan().all()
    assert replay().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("read", [bool, int, float, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.nonzero])
def test_a_capture_may_not_read_numbers(read: object) -> None:
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
        Replayed().record(lambda: read(x + 1))  # type: ignore[operator]
    recorder = Replayed()
    again = recorder.record(lambda: recorder.launch(lambda y: y + int(y), x))  # a kernel may
    x.fill_(4)
    assert again().tolist() == [8.0]
