"""Memory that is freed and asked for again costs page faults only once."""

import platform
import subprocess
import sys

import pytest

from sparsedp.grad_sample.buffers import keep_freed_memory

FAULTS = """
import resource, sys
import torch
from sparsedp import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(12):  # the heap grows for some batches until what is freed fits what is asked for
    torch.ones(10_000_000).add(1)
before = faults()
for _ in range(5):
    torch.ones(10_000_000).add(1)
print(faults() - before)
"""


def faults_of_five_batches(word):
    done = subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_batches_after_the_first_find_their_memory_in_place():
    assert faults_of_five_batches("keep") < 0.1 * faults_of_five_batches("leave")


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr("sparsedp.grad_sample.buffers.ctypes.CDLL", lambda name: object())
    assert keep_freed_memory() is False


HOLES = """
import resource, sys
from sparsedp.grad_sample.buffers import give_back_freed_memory, keep_freed_memory

def held():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()

if sys.argv[1] == "keep":
    assert keep_freed_memory()
pieces = [bytearray(100_000) for _ in range(600)]
del pieces[:-1]  # the last one, on top, keeps the C library from giving back the rest
before = held()
give_back_freed_memory()
print(before - held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
@pytest.mark.parametrize(("word", "given_back"), [("leave", True), ("keep", False)])
def test_holes_are_given_back_unless_they_were_to_be_kept(word, given_back):
    done = subprocess.run([sys.executable, "-c", HOLES, word], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 30_000_000) is given_back
