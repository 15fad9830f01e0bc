"""Executors open, close, leak, share, fork and die with the interpreter without leaving anything behind."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
from executor_cases import machine

from pyxdev.backends import open as open_backend
from pyxdev.errors import Busy, Closed, Forked, InvalidArgument, NoPeerAccess, SettingError
from pyxdev.executor import Executor, Stage


def add_one(x: Any) -> Any:
    return x + 1


def pipe(**options: Any) -> Executor:
    slow = Stage(add_one, cost=1e-3, out=lambda x: x)
    return Executor([0, 1], [slow, slow], host_stage="0", **{"machine": machine(2), **options})


# ---- laziness ----


def test_map_is_lazy_and_bounded() -> None:
    taken: list[int] = []

    def source() -> Any:
        for n in itertools.count():
            taken.append(n)
            yield np.full(10, n)

    with pipe(in_flight=3) as executor:
        results = executor.map(source())
        assert taken == []
        for n in range(5):
            assert next(results)[0] == n + 2
            assert len(taken) == n + 3
        results.close()  # abandoned half way
        assert next(executor.map([np.zeros(3)]))[0] == 2


def test_no_drain_between_maps() -> None:
    with pipe(in_flight=4) as executor:
        one, two = executor.map([np.zeros(3)] * 2), executor.map([np.ones(3)] * 2)
        assert [next(one)[0], next(two)[0], next(one)[0], next(two)[0]] == [2, 3, 2, 3]


def test_map_of_nothing_and_of_an_input_that_raises() -> None:
    def source() -> Any:
        yield np.zeros(3)
        raise LookupError("no more")

    with pipe() as executor:
        assert list(executor.map([])) == []
        with pytest.raises(LookupError):
            list(executor.map(source()))
        assert next(executor.map([np.zeros(3)], progress=True))[0] == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_quiet_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        with pipe() as executor:
            for inputs, total in (([np.zeros(3)] * 4, "4"), ((np.zeros(3) for _ in range(4)), "?")):
                stream.truncate(0)
                assert len(list(executor.map(inputs, progress=True))) == 4
                if stream.isatty():
                    assert "microbatches" in stream.getvalue() and f"4/{total}" in stream.getvalue()
                else:
                    assert not stream.getvalue()


def test_submit_blocks_at_the_bound_only() -> None:
    with pipe(in_flight=4) as executor:
        tickets = [executor.submit(np.zeros(10)) for _ in range(4)]
        assert executor.stats().blocked == {"admit": 0, "result": 0} and executor.stats().in_flight == 4
        executor.submit(np.zeros(10))
        assert executor.stats().blocked["admit"] > 1e-3
        tickets[3].result()
        assert executor.stats().blocked["result"] > 1e-3


# ---- open ----


@pytest.mark.parametrize(
    "devices, message",
    [
        ([], "devices is empty"),
        ([0, 99], r"devices\[1\] is 99; there are 4 sim devices: 0 to 3"),
        ([-1], r"devices\[0\] is -1"),
        ([True], r"devices\[0\] is True, a bool"),
        (["0"], r"devices\[0\] is the text '0'"),
        (["cuda:1"], r"devices\[0\] is the text 'cuda:1'"),
        ([0.0], r"devices\[0\] is 0.0, no whole number"),
        ([None], r"devices\[0\] is None, a NoneType"),
        ("01", "devices is '01'; a sequence of device numbers"),
        (2, "devices is 2; a sequence of device numbers"),
        ({0, 1}, "a sequence of device numbers"),
        ([0, 1, 2], "3 devices for 2 stages"),
    ],
)
def test_wrong_devices_each_have_their_message(devices: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Executor(devices, [add_one, add_one], machine=machine(4))


@pytest.mark.parametrize(
    "devices", [[0, 0], [0], [1, 0], [np.int64(1)], (n for n in (1, 0)), np.array([0, 1]), range(2)]
)
def test_right_devices(devices: Any) -> None:
    with Executor(devices, [add_one, add_one], machine=machine(2)) as executor:
        assert executor.submit(np.zeros(3)).result()[0] == 2


@pytest.mark.parametrize(
    "stages, options, error, message",
    [
        ([], {}, InvalidArgument, "stages is empty"),
        ([3], {}, InvalidArgument, r"stages\[0\] is 3"),
        (3, {}, InvalidArgument, "stages is 3"),
        (
            [add_one],
            {"in_flight": 0},
            InvalidArgument,
            "in_flight is 0; allowed: auto, or a whole number from 1 to",
        ),
        ([add_one], {"in_flight": "four"}, InvalidArgument, "in_flight is 'four'"),
        ([add_one], {"in_flight": True}, InvalidArgument, "in_flight is True"),
        ([add_one], {"depth": -1}, InvalidArgument, "depth is -1"),
        ([add_one], {"depth": 2.0}, InvalidArgument, "depth is 2.0"),
        ([add_one], {"adapter": "jax"}, InvalidArgument, "adapter is 'jax'; allowed: auto, numpy, torch, cupy"),
        ([add_one], {"adapter": "cupy"}, Exception, "cupy adapter does not run on sim devices"),
        ([add_one], {"host_stage": "yes"}, SettingError, "host_stage"),
        ([add_one], {"tile_mb": 0}, SettingError, "tile_mb"),
        ([add_one], {"gate": "off"}, SettingError, "gate"),
        ([Stage(add_one, device=7)], {}, InvalidArgument, "the device of stage 0 is 7"),
        ([add_one, add_one], {"host_stage": "0"}, NoPeerAccess, "from device 0 to device 1"),
    ],
)
def test_wrong_arguments_leave_nothing_open(stages: Any, options: Any, error: Any, message: str) -> None:
    no_peers = machine(2) | {"peer": {"groups": "none"}}
    with open_backend("sim", machine=no_peers) as runtime:
        for at in ({"runtime": runtime}, {"machine": no_peers}):
            with pytest.raises(error, match=message):
                Executor([0, 1][: max(1, len(stages))] if isinstance(stages, list) else [0], stages, **options, **at)
        assert not runtime.live().any()


def test_a_stage_must_be_callable() -> None:
    with pytest.raises(InvalidArgument, match="a stage's fn is 3"):
        Stage(3)  # type: ignore[arg-type]


def test_what_belongs_to_the_runtime_cannot_be_changed_by_an_executor() -> None:
    with open_backend("sim") as runtime:
        for name, value in (("backend", "sim"), ("machine", "default"), ("force_sync", True)):
            with pytest.raises(InvalidArgument, match=f"{name} is .* belongs to the runtime"):
                Executor([0], [add_one], runtime=runtime, **{name: value})  # type: ignore[arg-type]


def test_settings_of_the_runtime_hold_unless_an_argument_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYXDEV_HOST_STAGE", "1")
    with open_backend("sim", machine=machine(2)) as runtime:
        monkeypatch.setenv("PYXDEV_HOST_STAGE", "0")
        for options, path in (({}, "staged"), ({"host_stage": "0"}, "direct")):
            with Executor([0, 1], [add_one] * 2, runtime=runtime, **options) as executor:
                assert executor.plan().links[0].path == path
    with Executor([0, 1], [add_one] * 2, machine=machine(2)) as executor:
        assert executor.plan().links[0].path == "direct"


@pytest.mark.parametrize("option", [{"force_sync": True}, {"gate": False, "in_flight": 1}])
def test_other_settings_give_the_same_results(option: Any) -> None:
    with pipe(**option) as executor:
        assert [y[0] for y in executor.map([np.full(50, n) for n in range(9)])] == list(range(2, 11))
        assert executor.runtime.force_sync == option.get("force_sync", False)


# ---- close ----


def test_close_waits_for_what_is_in_flight() -> None:
    seen: list[float] = []

    def note(x: Any) -> Any:
        seen.append(float(x[0]))
        return x

    with open_backend("sim", machine=machine(2)) as runtime:
        executor = Executor([0, 1], [add_one, Stage(note, cost=1e-2)], runtime=runtime)
        tickets = [executor.submit(np.full(10, n)) for n in range(4)]
        executor.close()
        assert seen == [1, 2, 3, 4]
        assert not runtime.live().any()
        with pytest.raises(Closed):
            tickets[0].result()


def test_close_is_idempotent_and_happens_on_errors_too() -> None:
    with open_backend("sim", machine=machine(2)) as runtime:
        with pytest.raises(LookupError), Executor([0], [add_one], runtime=runtime) as executor:
            executor.submit(np.zeros(3))
            raise LookupError
        executor.close()
        assert executor.closed and not runtime.closed and not runtime.live().any()


def test_an_executor_that_is_dropped_warns_and_closes() -> None:
    with open_backend("sim", machine=machine(2)) as runtime:
        executor = Executor([0, 1], [add_one, add_one], runtime=runtime)
        executor.submit(np.zeros(3)).result()
        gone = weakref.ref(executor)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del executor
            gc.collect()
            texts = [str(warning.message) for warning in caught]
            caught.clear()  # a warning refers to what it is about
        assert texts == ["unclosed <pyxdev.Executor of 2 stages on devices [0, 1]>"]
        assert gone() is None
        assert not runtime.live().any()


def test_an_exception_that_is_kept_keeps_nothing_open() -> None:
    """It refers to the frames of whoever waited for the device when the stage raised: here a result on its way to the
    host, whose bytes must not have a name there."""
    kept = ValueError("bad")
    callers: list[str] = []

    def stage(x: Any) -> Any:
        if x[0] == 0:
            return x
        frame = sys._getframe()
        while frame.f_back:
            frame = frame.f_back
            callers.append(frame.f_code.co_name)
        raise kept

    with open_backend("sim", machine=machine(1)) as runtime:
        with Executor([0], [Stage(stage, out=lambda x: x)], runtime=runtime) as executor:
            tickets = [executor.submit(np.full(1000, n)) for n in range(2)]
            assert tickets[0].result()[0] == 0
            assert "read" in callers and kept.__traceback__ is not None
        assert not runtime.live().any()


def test_a_ticket_keeps_its_executor() -> None:
    executor = pipe()
    ticket = executor.submit(np.zeros(3))
    keep = weakref.ref(executor)
    del executor
    gc.collect()
    assert ticket.result()[0] == 2
    last = keep()
    assert last is not None
    last.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_letting_go(order: tuple[int, ...]) -> None:
    with open_backend("sim", machine=machine(2)) as runtime:
        executor = Executor([0, 1], [add_one, add_one], runtime=runtime)
        things: list[Any] = [executor.submit(np.zeros(3)), executor.submit(executor.submit(np.zeros(3))), executor]
        things[0].result()
        executor.close()
        del executor
        for n in order:
            things[n] = None
            gc.collect()
        assert not runtime.live().any()


def test_raw_results_outlive_the_executor_and_its_own_runtime() -> None:
    with Executor([0], [lambda stage, x: x], adapter="raw", machine=machine(1)) as executor:
        y = executor.submit(np.arange(3)).result()
        runtime = executor.runtime
    assert y.numpy().tolist() == [0, 1, 2]
    assert not runtime.closed and runtime.live().buffers == 1
    del y
    assert not runtime.live().any()
    del runtime, executor  # closed, and without a warning


def test_raw_results_keep_a_runtime_of_the_callers_busy() -> None:
    with open_backend("sim", machine=machine(1)) as runtime:
        with Executor([0], [lambda stage, x: x], adapter="raw", runtime=runtime) as executor:
            y = executor.submit(np.arange(3)).result()
        with pytest.raises(Busy, match="1 buffer"):
            runtime.close()
        del y


def test_a_raw_result_in_a_cycle_is_collected_like_any_other() -> None:
    with (
        open_backend("sim", machine=machine(1)) as runtime,
        Executor([0], [lambda stage, x: x], adapter="raw", runtime=runtime) as executor,
    ):
        alive = []
        for n in range(5):
            cycle: list[Any] = [executor.submit(np.arange(3) + n).result()]
            cycle.append(cycle)
            assert cycle[0].numpy().tolist() == [n, n + 1, n + 2]
            del cycle
            gc.collect()
            alive.append(runtime.live().buffers)
        assert alive[2:] == alive[1:2] * 3, alive


# ---- several at once ----


def test_several_executors_on_one_runtime_and_on_several() -> None:
    with open_backend("sim", machine=machine(2)) as runtime:
        with pipe() as one, Executor([1, 0], [add_one] * 2, runtime=runtime) as two:
            with Executor([0], [lambda x: x * 3], runtime=runtime) as three:
                for n in range(5):
                    x = np.full(10, n)
                    tickets = [executor.submit(x) for executor in (one, two, three)]
                    assert [ticket.result()[0] for ticket in tickets] == [n + 2, n + 2, n * 3]
            assert two.submit(np.zeros(2)).result()[0] == 2
        assert not runtime.live().any()


@pytest.mark.parametrize("shared", [False, True])
def test_stages_of_two_executors_run_at_once_where_python_can(shared: bool) -> None:
    """Each looks for the other, in Python and never made to give way: under the GIL at most one meets it."""
    free = not getattr(sys, "_is_gil_enabled", lambda: True)()
    inside = [False, False]
    met = [False, False]

    def look(me: int, x: Any) -> Any:
        inside[me] = True
        for _ in range(10**9 if free else 10**5):
            if inside[1 - me]:
                met[me] = True
                break
        return x

    before = sys.getswitchinterval()
    with open_backend("sim", machine=machine(2)) as runtime:
        options: dict[str, Any] = {"runtime": runtime} if shared else {"machine": machine(2)}
        stages = [Stage(lambda stage, x, me=me: look(me, x), adapter="raw") for me in range(2)]
        with Executor([0], stages[:1], **options) as one, Executor([1], stages[1:], **options) as two:
            threads = [threading.Thread(target=executor.submit, args=(np.zeros(3),)) for executor in (one, two)]
            try:
                sys.setswitchinterval(1000)
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                sys.setswitchinterval(before)
    assert inside == [True, True] and all(met) == free


def test_many_threads_submit_and_wait() -> None:
    failures: list[BaseException] = []
    with pipe(in_flight=5) as executor:

        def work(number: int) -> None:
            try:
                for n in range(20):
                    ticket = executor.submit(np.full(100, number * 1000 + n))
                    if n % 3 == 0:
                        ticket = executor.submit(ticket)
                    wanted = number * 1000 + n + (4 if n % 3 == 0 else 2)
                    assert (ticket.result() == wanted).all()
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert executor.stats().in_flight == 0


def test_close_from_another_thread_ends_who_waits() -> None:
    """One thread is blocked in submit, another in result, while a third closes."""
    outcomes: list[Any] = []
    started = threading.Barrier(3)
    executor = Executor([0], [Stage(add_one, cost=1.0, out=lambda x: x)], in_flight=1, machine=machine(1))
    first = executor.submit(np.zeros(3))

    def attempt(act: Any) -> None:
        started.wait()
        try:
            outcomes.append(act())
        except Closed as error:
            outcomes.append(error)

    threads = [
        threading.Thread(target=attempt, args=(act,)) for act in (first.result, lambda: executor.submit(np.ones(3)))
    ]
    for thread in threads:
        thread.start()
    started.wait()
    executor.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(outcomes) == 2


# ---- other processes ----


def child(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    setup = "import numpy as np, os, sys, signal\nfrom pyxdev import Executor, Stage\n"
    return subprocess.run(
        [sys.executable, *options, "-c", setup + program], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_interpreter_may_end_with_work_in_flight() -> None:
    done = child(
        "ex = Executor([0, 1], [Stage(lambda x: x, cost=1.0)] * 2, backend='sim', in_flight=8)\n"
        "tickets = [ex.submit(np.zeros(1000)) for _ in range(8)]\n"
        "print('end')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_an_exception_at_the_end_is_all_that_is_seen() -> None:
    done = child(
        "with Executor([0, 1], [Stage(lambda x: x, cost=1.0)] * 2, backend='sim') as ex:\n"
        "    tickets = [ex.submit(np.zeros(1000)) for _ in range(4)]\n"
        "    raise LookupError('mine')\n"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("LookupError: mine\n")
    assert "unclosed" not in done.stderr and done.stderr.count("Error: ") == 1


def test_a_forked_child_cannot_use_it_and_the_parent_goes_on() -> None:
    program = """
from pyxdev.errors import Forked
with Executor([0], [lambda x: x + 1], backend="sim") as ex:
    ticket = ex.submit(np.zeros(3))
    pid = os.fork()
    if not pid:
        for act in (lambda: ex.submit(np.zeros(3)), ticket.result, ex.stats):
            try:
                act()
                os._exit(1)
            except Forked:
                pass
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert ticket.result()[0] == 1
    assert ex.submit(np.zeros(3)).result()[0] == 1
print("parent")
"""
    done = child(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent\n", "")
    assert Forked is not None


def test_ctrl_c_ends_a_program_that_waits() -> None:
    program = """
import threading
import warnings
def busy(x):
    while True:
        pass
ex = Executor([0], [Stage(busy, out=lambda x: x)], backend="sim")
ticket = ex.submit(np.zeros(3))
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
ticket.result()
"""
    done = child(program)
    # Python 3.14 ends by the signal for subclasses of KeyboardInterrupt too.
    assert done.returncode == (1 if sys.version_info < (3, 14) else -signal.SIGINT)
    assert "StageInterrupted" in done.stderr
    assert os.name == "posix"
