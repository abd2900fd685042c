"""Kernels are loaded when they are first called, not compiled: no first row waits for seconds."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

MADE = """
import numba as nb
import numpy as np
from tailrace.compiled import compiled
from tailrace.protocol.frames import FROZEN_BYTES

@compiled(*[nb.int64(FROZEN_BYTES, whole[::1], nb.int64) for whole in (nb.int32, nb.int64)])
def total(frozen, whole, factor):
    return (frozen.sum() + whole.sum()) * factor

@compiled(nb.int64(nb.int64, nb.int64), allocates=True)
def callee(size, divisor):
    return len(np.empty(size, np.uint8)) // divisor

@compiled(nb.int64(nb.int64, nb.int64), error_model="numpy")
def caller(size, divisor):
    return callee(size, divisor)

@compiled(nb.int64(nb.int64))
def factorial(number):
    return number * factorial(number - 1) if number > 1 else 1
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with kernels that are in no cache."""
    (tmp_path / "made_kernels.py").write_text(MADE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("made_kernels")
    del sys.modules["made_kernels"]


def output(code: str) -> str:
    command = [sys.executable, "-c", code]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=environment)
    return done.stdout.strip()


@pytest.mark.slow
def test_after_warm_no_process_compiles_a_kernel() -> None:
    subprocess.run([sys.executable, "-m", "tailrace.warm"], check=True, capture_output=True, timeout=600)
    missed = output(
        "from tailrace.compiled import KERNELS\n"
        "from tailrace.warm import load_kernels\n"
        "load_kernels()\n"
        "assert all(kernel.signatures for kernel in KERNELS)\n"
        "print(len(KERNELS), sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS))"
    )
    kernels, compiled = map(int, missed.split())
    assert kernels > 100
    assert compiled == 0


@pytest.mark.slow
@pytest.mark.parametrize("compiled_before", [True, False])
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives its rights up")
def test_kernels_of_a_package_that_is_read_only_are_kept_in_a_folder_of_the_user(
    tmp_path: Path, compiled_before: bool
) -> None:
    """Root without its rights over folders without write permission is such a user, here without a home."""
    module = tmp_path / "package" / "made_kernels.py"
    module.parent.mkdir()
    module.write_text(MADE)
    (cache := module.parent / "__pycache__").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    code = (
        "import made_kernels\n"
        "from tailrace.compiled import load_all\n"
        "said = []\n"
        "assert load_all(lambda: said.append('compiling')) is bool(said)\n"
        "print(made_kernels.factorial(5), said)"
    )
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ, "PYTHONPATH": f"{module.parent}:{root}", "HOME": "/proc/none", "XDG_CACHE_HOME": "",
        "TMPDIR": str(temporary),
    }  # fmt: skip
    limits = ["setpriv", "--bounding-set", "-dac_override", "--inh-caps", "-dac_override"]

    def said(*limits: str) -> str:
        command = [*limits, sys.executable, "-c", code]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=600, env=environment
        )
        return done.stdout.strip()

    if compiled_before:
        assert said() == "120 ['compiling']"
    cache.chmod(0o555)
    module.parent.chmod(0o555)
    assert said(*limits) == ("120 []" if compiled_before else "120 ['compiling']")
    assert said(*limits) == "120 []"
    assert any(cache.glob("*.nbi")) is compiled_before
    kept = temporary / f"tailrace-kernels-{os.getuid()}"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert any(kept.rglob("*.nbi"))


@pytest.mark.slow
def test_a_command_that_calls_no_kernel_loads_none() -> None:
    code = (
        "import tailrace.cli.run\n"
        "from tailrace.compiled import KERNELS\n"
        "print(len(KERNELS) > 50, [kernel.__name__ for kernel in KERNELS if kernel.signatures])"
    )
    assert output(code) == "True []"


@pytest.mark.slow
def test_a_pipeline_loads_kernels_before_the_first_change(tmp_path: Path) -> None:
    code = (
        "from tailrace.compiled import KERNELS\n"
        "from tailrace.config.load import from_mapping\n"
        "from tailrace.pipeline.run import PipelineResources\n"
        "from tests.support.wait import wait_until\n"
        f"config = from_mapping({{'name': 'shop', 'log': {{'path': {str(tmp_path / 'log')!r}}}, 'source': "
        "{'dsn': 'postgresql://nobody@127.0.0.1:1/none', 'tables': ['public.a']}})\n"
        "PipelineResources(config, on_spark=False).start()\n"
        "wait_until(lambda: all(kernel.signatures for kernel in KERNELS), 120, 'the kernels')\n"
        "print(len(KERNELS) > 50)"
    )
    assert output(code) == "True"


@pytest.mark.slow
def test_a_kernel_accepts_what_its_signatures_say(made: Any) -> None:
    writable, frozen = np.ones(3, np.uint8), np.ones(3, np.uint8)
    frozen.flags.writeable = False
    refused: list[tuple[Any, ...]] = [
        (frozen, np.ones(2, np.int16), 1),
        (frozen, np.ones(2, np.float64), 1),
        (frozen, np.ones((2, 2), np.int64), 1),
        (frozen, np.frombuffer(bytes(16), np.int64), 1),
        (frozen, np.ones(2, np.int64), "1"),
        (frozen, np.ones(2, np.int64)),
    ]
    for arguments in refused * 2:
        with pytest.raises(TypeError):
            made.total(*arguments)
    assert made.total(writable, np.ones(2, np.int32), np.int32(2)) == 10
    assert made.total(frozen, whole=np.ones(2, np.int64), factor=True) == 5
    assert len(made.total.signatures) == 2


def test_a_callee_that_its_caller_has_compiled_keeps_its_own_options(made: Any) -> None:
    assert made.caller(12, 3) == 4
    with pytest.raises(ZeroDivisionError):
        made.caller(12, 0)
    assert made.callee(12, 4) == 3
    assert len(made.callee.signatures) == len(made.caller.signatures) == 1


def test_a_kernel_may_call_itself(made: Any) -> None:
    assert made.factorial(5) == 120
    assert len(made.factorial.signatures) == 1


def test_a_kernel_that_was_not_called_is_pickled_with_its_signatures(made: Any) -> None:
    pickled = pickle.dumps(made.factorial)
    assert len(made.factorial.signatures) == 1
    assert pickle.loads(pickled) is made.factorial  # noqa: S301 - its own


@pytest.mark.slow
def test_threads_may_call_a_kernel_first_at_the_same_time(made: Any) -> None:
    threads = 8
    together = Barrier(threads)

    def call(number: int) -> int:
        # Arguments that must be converted, of a type that was not used before.
        array = np.ones(3, np.int32)
        together.wait(timeout=60)
        return int(made.total(np.ones(3, np.uint8), array, np.uint16(number)))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(call, range(threads)))
    finally:
        sys.setswitchinterval(interval_s)
    assert found == [6 * number for number in range(threads)]
