"""The state of a process is compared again whenever a step is made; settings only before a program is taken."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from compiled_llm.compilation.kept.fingerprint.surroundings import ProcessWatch
from support.compilation.planted_changes import OF_PROCESS

SETTINGS = {name for name in OF_PROCESS if "setting" in name}
NOT_READ = {*SETTINGS, "TORCH_COMPILE_DISABLE"}  # Dynamo's own guards do not compare them either


@pytest.mark.parametrize("name", OF_PROCESS)
def test_a_change_of_the_process_is_noticed_until_it_is_undone(name):
    watch = ProcessWatch()
    with ExitStack() as stack:
        OF_PROCESS[name].make(stack, None)
        assert watch.holds() == (name in NOT_READ)
    assert watch.holds()


def test_the_number_of_threads_is_left_out_where_no_code_is_made_for_it():
    """On CUDA: what else changes beside it is noticed."""
    watch = ProcessWatch(threads=False)
    with ExitStack() as stack:
        OF_PROCESS["threads"].make(stack, None)
        assert watch.holds()
        OF_PROCESS["default dtype"].make(stack, None)
        assert not watch.holds()
    assert watch.holds()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_that_of_the_thread(mode):
    with mode():
        assert ProcessWatch().holds()
        watch = ProcessWatch()
    assert not watch.holds()
