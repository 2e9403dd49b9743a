"""Both sides of a tested program: the tester runs the tests, the candidate the program. Plain data passes between them.

    tester                                candidate
    asks for the name f           ->      looks f up in the program's module
    calls f([3, 1])               ->      calls the real one
    compares [1, 3], a real list  <-      [1, 3]

The tester never runs a line of the program, and the candidate never sees the tests, only the arguments of each call. So
an answer is compared by its value: an object that equals everything is no value, and equals nothing.

Differences from running the tests inside: identity is not kept (`f(x) is x` is false), and a list, set or dict that the
program changes is changed for the test only if the call returned None. Otherwise a program could change what it is
compared with.

`sandbox_child` imports this file on a bare interpreter: only the standard library, and little of it.
"""

from __future__ import annotations

import builtins
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it would double the start of each process
    from typing import Any

PASSED, FAILED, OUT_OF_MEMORY, CANNOT_TRAVEL = b"passed", b"failed", b"memory", b"untestable"


def run_candidate(source: int, sink: int) -> None:
    """Run the program that the tester sends, then call its functions as the tester asks."""
    from exchange import OPERATIONS, Peer, call_it

    module = types.ModuleType("program")
    sys.modules["__main__"] = sys.modules["program"] = module  # where unittest, doctest and pickle look
    builtins.exit = builtins.quit = sys.exit  # from the module site, which is not imported here

    def run(program: str, name: str, may_exit: bool) -> None:
        module.__name__ = name
        try:
            exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
        except SystemExit:
            if not may_exit:
                raise
        if name == "__main__" and may_exit:
            _end()

    def find(name: str) -> Any:
        if name in module.__dict__ or hasattr(builtins, name):
            return module.__dict__.get(name, getattr(builtins, name, None))
        raise NameError(f"name {name!r} is not defined")

    operations = {**OPERATIONS, "call": call_it, "get": getattr, "set": setattr, "run": run, "find": find}
    Peer(source, sink, operations, lambda _: True).serve()


def _end() -> None:
    """Do what Python does at the end of a program: wait for its threads, then call what it registered."""
    if threading := sys.modules.get("threading"):
        threading._shutdown()
    import atexit

    atexit._run_exitfuncs()


def run_tester(
    source: int, sink: int, program: str, name: str, may_exit: bool, setup: str, names: list[str], tests: str
) -> bytes:
    """Run the program as a module of this name, then the tests with its `names`. may_exit: whether sys.exit is a good end of the
    program. setup: code of the dataset that runs before the tests. Returns the end."""
    from exchange import ITERATION, CannotTravelError, Peer, show_error

    def call(function: Any, /, *args: Any, **named: Any) -> Any:
        if not any(function is lent for lent in peer.lent.values()):
            raise TypeError("not a function of the tests")
        return function(*args, **named)

    operations = {"call": call, **ITERATION}
    peer = Peer(source, sink, operations, lambda value: callable(value) or hasattr(type(value), "__next__"))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        peer.ask("run", program, name, may_exit)
        exec(compile(setup, "<setup>", "exec", dont_inherit=True), module.__dict__)
        module.__dict__.update({name: peer.ask("find", name) for name in names})
        exec(compile(tests, "<tests>", "exec", dont_inherit=True), module.__dict__)
        return PASSED
    except MemoryError:
        return OUT_OF_MEMORY
    except CannotTravelError as error:
        show_error(error)
        return CANNOT_TRAVEL
    except BaseException as error:
        show_error(error)
        return FAILED
